"""How fast values grow with the number of tokens: fits, laws and intervals.

>>> str(fit_power_law([8, 16, 32], [2.0, 4.0, 8.0]))
'n^1.00 ± 0.00'
"""

from howsmooth.reports.growth.fits import Growth, Plateau, growth
from howsmooth.reports.growth.laws import Law, PowerLaw, fit_power_law

__all__ = ["Growth", "Law", "Plateau", "PowerLaw", "fit_power_law", "growth"]
