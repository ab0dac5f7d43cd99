"""Training of character language models with any attention of `howsmooth.nn`, as in Kim et al. (2021).

Read `training_settings` and `text_batches`, then `model`, `run_files`, `loop` and `grid`.

>>> from howsmooth.papers.training import Corpus, TrainingSettings, train
>>> corpus = Corpus.split("to be or not to be, that is the question: " * 20)
>>> settings = TrainingSettings(attention="l2", depth=1, width=16, heads=2, length=8, steps=20, batch_tokens=64)
>>> result = train(corpus, settings)
>>> result.valid_bits < 5.0, result.bound > 0
(True, True)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
