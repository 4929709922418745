"""Optimizers for torch, over compiled kernels.  Needs torch (the extra `torch`).

    optimizer = tvm_qopt.optim.AdamW8bit(model.parameters(), lr=1e-3)

The classes are torch.optim.Optimizer's: 8bit, 4bit and Fp8 at the end of a name say how state is
kept; without, it is float32.  `optimizer_class` makes more of them.
"""

from __future__ import annotations

from tvm_qopt.optim.amp import GradScalerFP16
from tvm_qopt.optim.base import QoptOptimizer
from tvm_qopt.optim.classes import classes_of, optimizer_class
from tvm_qopt.optim.convert import from_torch
from tvm_qopt.optim.foreign.write import export_state_dict

Adam, Adam8bit, Adam4bit, AdamFp8 = classes_of(
    "adam", "Adam", "", "8bit", "4bit", "Fp8", module=__name__
)
AdamW, AdamW8bit, AdamW4bit, AdamWFp8 = classes_of(
    "adamw", "AdamW", "", "8bit", "4bit", "Fp8", module=__name__
)
SGD, SGD8bit = classes_of("sgd", "SGD", "", "8bit", module=__name__)
Lion, Lion8bit = classes_of("lion", "Lion", "", "8bit", module=__name__)
RMSprop, RMSprop8bit = classes_of("rmsprop", "RMSprop", "", "8bit", module=__name__)
Adagrad, Adagrad8bit = classes_of("adagrad", "Adagrad", "", "8bit", module=__name__)
AdEMAMix, AdEMAMix8bit = classes_of("ademamix", "AdEMAMix", "", "8bit", module=__name__)
LAMB, LAMB8bit = classes_of("lamb", "LAMB", "", "8bit", module=__name__)
LARS, LARS8bit = classes_of("lars", "LARS", "", "8bit", module=__name__)
LANS, LANS8bit = classes_of("lans", "LANS", "", "8bit", module=__name__)
AdamFP16 = optimizer_class("adam_fp16", "AdamFP16", module=__name__, master_weights="float32")

__all__ = [
    "AdEMAMix",
    "AdEMAMix8bit",
    "Adagrad",
    "Adagrad8bit",
    "Adam",
    "Adam4bit",
    "Adam8bit",
    "AdamFP16",
    "AdamFp8",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "GradScalerFP16",
    "LAMB",
    "LAMB8bit",
    "LANS",
    "LANS8bit",
    "LARS",
    "LARS8bit",
    "Lion",
    "Lion8bit",
    "QoptOptimizer",
    "RMSprop",
    "RMSprop8bit",
    "SGD",
    "SGD8bit",
    "export_state_dict",
    "from_torch",
    "optimizer_class",
]
