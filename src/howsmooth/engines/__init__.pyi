from .choice import Engine, complete, load_of, open_engine
from .dispatch import EngineError, Failure, Load, State, hand_over
from .processes import Processes
from .worker import Unfit

__all__ = [
    "Engine",
    "EngineError",
    "Failure",
    "Load",
    "Processes",
    "State",
    "Unfit",
    "complete",
    "hand_over",
    "load_of",
    "open_engine",
]
