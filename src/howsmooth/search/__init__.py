"""Searches for the input at which a map is least smooth: lower bounds with a witness.

Read `worst_case_search` (`worst_case`) and `search_question` (its checked arguments; random starts and the inputs of
theorems) first; then `ascent` (the two climbs: ascent and exchange of tokens), `norm_gradient` (their gradient) and
`witness` (the result and its file). `sandwich_search` adds upper bounds, `worst_measure_search` searches measures,
`attacks` searches adversarial images.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
