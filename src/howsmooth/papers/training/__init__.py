"""Training character language models whose attention can be told how smooth to be.

>>> from howsmooth.papers.training import Corpus, Settings, train
>>> corpus = Corpus.split("to be or not to be, that is the question: " * 20)
>>> settings = Settings(attention="l2", depth=1, width=16, heads=2, length=8, steps=20, batch_tokens=64)
>>> result = train(corpus, settings)
>>> result.valid_bits < 5.0, result.bound > 0
(True, True)
"""

from howsmooth.nn.layers.untied_l2 import UntiedL2Attention
from howsmooth.papers.training.checkpoints import Checkpoint
from howsmooth.papers.training.corpus import Corpus, decode, documents, encode
from howsmooth.papers.training.grid import Grid, gap_closed, mean_bits, run_grid
from howsmooth.papers.training.lengths import Batch, Chunks, Curriculum, Fixed, plan, powers, validation
from howsmooth.papers.training.loop import Stopped, evaluate, load_model, train
from howsmooth.papers.training.model import CharacterModel
from howsmooth.papers.training.run_status import Intervals, Result, Status
from howsmooth.papers.training.training_settings import ATTENTIONS, Settings

__all__ = [
    "ATTENTIONS",
    "Batch",
    "CharacterModel",
    "Checkpoint",
    "Chunks",
    "Corpus",
    "Curriculum",
    "Fixed",
    "Grid",
    "Intervals",
    "Result",
    "Settings",
    "Status",
    "Stopped",
    "UntiedL2Attention",
    "decode",
    "documents",
    "encode",
    "evaluate",
    "gap_closed",
    "load_model",
    "mean_bits",
    "plan",
    "powers",
    "run_grid",
    "train",
    "validation",
]
