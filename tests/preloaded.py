"""What the fork server of ``sessions`` imports once for all. It must not compute: threads do not survive a fork."""

import gc

import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo  # noqa: F401 - torch's optimizers import it on first use, which takes seconds
import tyro  # noqa: F401

import dit.report  # noqa: F401
import dit.trial  # noqa: F401
from dit.cli import train_config

torch.set_num_threads(1)
train_config(["--model", "DiT-S/8", "--data", "synthetic"], prog="train.py")  # the parser fills its caches
gc.collect()
gc.freeze()  # the memory watch looks at every object that Python knows; what lies here holds no tensors
