"""Chooses the `Ops` of a device; Triton is imported only where it will be used."""

from __future__ import annotations

import torch

from engine.kernels.ops import Ops
from engine.kernels.torch_ops import TorchOps


def select_ops(device: torch.device) -> Ops:
    """Triton kernels on an NVIDIA GPU, plain torch elsewhere."""
    if device.type != "cuda":
        return TorchOps()
    from engine.kernels.triton_ops import TritonOps

    return TritonOps()
