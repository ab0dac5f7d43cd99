from .grid import Grid, run_grid
from .loop import load_model, train
from .model import CharacterModel
from .run_files import Intervals
from .text_batches import Corpus
from .training_settings import TrainingSettings

__all__ = [
    "CharacterModel",
    "Corpus",
    "Grid",
    "Intervals",
    "TrainingSettings",
    "load_model",
    "run_grid",
    "train",
]
