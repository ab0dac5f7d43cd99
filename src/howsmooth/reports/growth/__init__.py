"""Growth of values with the number of tokens: the fitted exponent, its interval, and the law that fits best.

Read `laws` (least squares, the compared laws) and `fits` (`growth`, its intervals and its result).

>>> str(fit_power_law([8, 16, 32], [2.0, 4.0, 8.0]))
'n^1.00 ± 0.00'
"""

from howsmooth.reports.growth.fits import Growth, growth
from howsmooth.reports.growth.laws import PowerLaw, fit_power_law

__all__ = ["Growth", "PowerLaw", "fit_power_law", "growth"]
