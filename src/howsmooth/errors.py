"""The errors howsmooth raises on purpose: one sentence that says what is wrong and what to do."""

from __future__ import annotations


class HowsmoothError(Exception):
    """Base class; the command line prints it as one line and exits with code 2."""


class InvalidInput(HowsmoothError, ValueError):
    """A tensor, shape, dtype or option that no right answer exists for."""


class NotDifferentiable(HowsmoothError, TypeError):
    """A function whose Jacobian does not exist or cannot be reached by automatic differentiation."""


class UnsupportedModel(HowsmoothError, ValueError):
    """A model or module whose attention cannot be read faithfully."""


class MissingPackage(HowsmoothError, ImportError):
    """A package that this work needs and that is installed on request; the message names the command."""


class DoesNotApply(HowsmoothError, ValueError):
    """A theorem outside its assumptions; the message names the assumption and the nearest bound that does apply."""
