from .choice import Engine, open_engine
from .dispatch import EngineError, Load, submit_all

__all__ = [
    "Engine",
    "EngineError",
    "Load",
    "open_engine",
    "submit_all",
]
