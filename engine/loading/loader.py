"""Build a model and stream a checkpoint into it.

The loader knows no tensor by name: the model says what it needs and what may be left over,
and loading ends only when nothing is missing.  Called by `engine.build`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.api.config import Quantization
from engine.api.errors import BrokenCheckpoint, UnsupportedModel
from engine.kernels.encoder_ops import PackedEncoderOps
from engine.kernels.ops import Ops
from engine.kernels.torch_ops import TorchOps
from engine.layers.packed_floats import float_shape
from engine.layers.packed_weight import CodedRows, PackedWeight, packed_shape
from engine.layers.placement import ParameterMemory
from engine.loading.checkpoint import Checkpoint
from engine.loading.dummy_checkpoint import DummyCheckpoint
from engine.loading.packed_cache import PackedCache
from engine.loading.quantize import INT8, quantize_rows
from engine.loading.read_plan import StoredTensor
from engine.loading.staging import Staging, staging_for
from engine.loading.weight_stream import stream_tensors
from engine.models.decoder import DecoderModel
from engine.models.encoder import EncoderModel
from engine.models.loadable import LoadableModel
from engine.models.registry import encoder_class, model_class

_NUM_NAMED = 5
_PROGRESS_INTERVAL_S = 0.05


def packs_weights(quantization: Quantization | None, device: torch.device) -> bool:
    """Whether the model's matrices are packed; all of them are or none.

    On a CPU they are, unless `quantization` is None.  Raises `UnsupportedModel` for "int8" on other devices.
    """
    if device.type != "cpu" and quantization == "int8":
        raise UnsupportedModel(
            f"Weights are quantised to int8 on the CPU only, and the device is {device.type}; "
            "use --quantization auto, or --device cpu."
        )
    return device.type == "cpu" and quantization is not None


def quantizes_weights(checkpoint: Checkpoint, quantization: Quantization | None) -> bool:
    """Whether packed matrices stay, or become, quantised; all of them do or none.

    Always for "int8", never for "none", and for "auto" if the checkpoint holds quantised matrices.
    """
    return quantization == "int8" or (quantization == "auto" and bool(checkpoint.codings()))


@dataclass(frozen=True, slots=True)
class _PackedForm:
    """What a packed model's matrices are made of: codes, or floats that are rounded if wider than `dtype`."""

    is_quantized: bool
    dtype: torch.dtype

    def of(self, name: str, values: torch.Tensor | CodedRows) -> torch.Tensor | CodedRows:
        """The matrix `name` as it is packed."""
        if isinstance(values, CodedRows):
            return values
        return quantize_rows(name, values) if self.is_quantized else values.to(self.float_dtype(values.dtype))

    def float_dtype(self, stored: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype.itemsize < stored.itemsize else stored


def load_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None],
    staging: Staging | None = None,
    quantization: Quantization | None = None,
    packed_ops: Callable[[], Ops[PackedWeight]] = TorchOps,
    packed_folder: Path | None = None,
    memory: ParameterMemory | None = None,
) -> DecoderModel:
    """A model on `device` with all weights in `dtype`, or packed (`packs_weights`, `DecoderModel.is_packed`).

    Packed models compute with `packed_ops()`, in float32 whatever `dtype` is.  Quantised ones (`quantizes_weights`)
    are kept in `packed_folder` for the next start; floats stay in the checkpoint's format, unless `dtype` is narrower.
    Weights stored as plain numbers are streamed through `staging` (by default: to GPUs only); all others come one at a
    time from the memory map.  Parameters lie in `memory`, if there is one.  `on_progress` gets how much is loaded and
    the total, in bytes where weights are streamed, else in tensors.  Raises `UnsupportedModel`, or `BrokenCheckpoint`
    before reading any weight when tensors are missing or left over.
    """
    found = model_class(checkpoint.config)
    is_packed = packs_weights(quantization, device)
    form = _PackedForm(quantizes_weights(checkpoint, quantization), dtype)
    model = found(
        found.config_class.from_hf(checkpoint.config),
        device=device,
        dtype=torch.float32 if is_packed else dtype,
        packed_ops=packed_ops() if is_packed else None,
        memory=memory,
    )
    _fill(model, checkpoint, form, staging or staging_for(device), packed_folder, on_progress, is_packed=is_packed)
    return model


def load_encoder(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None],
    packed_ops: PackedEncoderOps | None = None,
    memory: ParameterMemory | None = None,
) -> EncoderModel:
    """An encoder on `device` with all weights in `dtype`; with `packed_ops` its layers' matrices are packed floats.

    Parameters lie in `memory`, if there is one.  Progress and errors as `load_model`.
    """
    found, is_packed = encoder_class(checkpoint.config), packed_ops is not None
    model = found(
        found.config_class.from_hf(checkpoint.config), device=device, dtype=dtype, packed_ops=packed_ops, memory=memory
    )
    form = _PackedForm(False, dtype)
    _fill(model, checkpoint, form, staging_for(device), None, on_progress, is_packed=is_packed)
    return model


def _fill(
    model: LoadableModel,
    checkpoint: Checkpoint,
    form: _PackedForm,
    staging: Staging | None,
    packed_folder: Path | None,
    on_progress: Callable[[int, int], None],
    *,
    is_packed: bool,
) -> None:
    with torch.no_grad():
        if isinstance(checkpoint, DummyCheckpoint):
            checkpoint.fill(model, form.of)
            model.eval()
            return
        _require_match(model, checkpoint.tensor_names())
        stored = checkpoint.stored_tensors()
        if is_packed:
            _load_packed(model, checkpoint, form, packed_folder, on_progress)
        elif staging is None or stored is None:
            _load_from_map(model, checkpoint, on_progress)
        else:
            _load_through(staging, model, stored, on_progress)
        _refuse("lacks", "the model needs", model.missing_weights())
    model.eval()


def weight_bytes(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    *,
    quantization: Quantization | None = None,
    device: torch.device | None = None,
) -> int:
    """What the model's weights will take as `load_model` loads them, before any is read; errors as there.

    Without a `device`, and on GPUs, they are in `dtype`.
    """
    found = model_class(checkpoint.config)
    config, meta = found.config_class.from_hf(checkpoint.config), torch.device("meta")
    if device is None or not packs_weights(quantization, device):
        model = found(config, device=meta, dtype=dtype)
        return sum(parameter.nbytes for parameter in model.parameters())
    model = found(config, device=meta, dtype=torch.float32, packed_ops=TorchOps())
    form, codings = _PackedForm(quantizes_weights(checkpoint, quantization), dtype), checkpoint.codings()
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for name, slot in model.weight_slots():
        if slot.is_packed and form.is_quantized:
            num_bytes += math.prod(packed_shape(codings.get(name, INT8), *slot.shape))
        elif slot.is_packed:
            num_bytes += math.prod(float_shape(*slot.shape)) * form.float_dtype(checkpoint.float_dtype(name)).itemsize
    return num_bytes


def encoder_weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """What an encoder's weights will take as `load_encoder` loads them, before any is read; errors as there.

    Packed matrices take as much as plain ones, but for a few rows of zeros.
    """
    found = encoder_class(checkpoint.config)
    model = found(found.config_class.from_hf(checkpoint.config), device=torch.device("meta"), dtype=dtype)
    return sum(parameter.nbytes for parameter in model.parameters())


def _require_match(model: LoadableModel, names: list[str]) -> None:
    needed, found = model.missing_weights(), set(names)
    _refuse("lacks", "the model needs", [name for name in needed if name not in found])
    left_over = sorted(name for name in found.difference(needed) if not model.ignores_weight(name))
    _refuse("has", "the model has no place for", left_over)


def _refuse(verb: str, relation: str, names: list[str]) -> None:
    if names:
        listed = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
        raise BrokenCheckpoint(
            f"The checkpoint {verb} {len(names)} tensors that {relation} ({listed}); pull the model again."
        )


def _load_from_map(model: LoadableModel, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> None:
    total = len(checkpoint.tensor_names())
    on_progress(0, total)
    for done, (name, tensor) in enumerate(checkpoint.tensors(), start=1):
        model.load_weight(name, tensor)
        on_progress(done, total)


def _load_packed(
    model: LoadableModel,
    checkpoint: Checkpoint,
    form: _PackedForm,
    folder: Path | None,
    on_progress: Callable[[int, int], None],
) -> None:
    # `PackedCache` says why floats are not kept.
    cache = PackedCache(folder if form.is_quantized else None, checkpoint.files())
    total = len(checkpoint.tensor_names())
    on_progress(0, total)
    if cache.load(model):
        on_progress(total, total)
        return
    to_pack = {name for name, slot in model.weight_slots() if slot.is_packed}
    with _one_thread():
        tensors = checkpoint.coded_tensors() if form.is_quantized else checkpoint.tensors()
        for done, (name, values) in enumerate(tensors, start=1):
            is_matrix = name in to_pack and len(values.shape) == 2
            model.load_weight(name, form.of(name, values) if is_matrix else values)
            on_progress(done, total)
    cache.store_in_background(model)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch computes on one thread: its threads wait for one another after every operation of a millisecond or
    less, which takes twenty times as long where other programs use the cores too.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _load_through(
    staging: Staging, model: LoadableModel, stored: list[StoredTensor], on_progress: Callable[[int, int], None]
) -> None:
    slots = dict(model.weight_slots())
    wanted = [tensor for tensor in stored if tensor.name in slots]

    def landing(tensor: StoredTensor) -> torch.Tensor | None:
        slot = slots[tensor.name]
        return slot.landing(tensor.dtype) if slot.shape == tensor.shape else None

    report = _now_and_then(on_progress, sum(tensor.num_bytes for tensor in wanted))
    report(0)
    with staging, closing(stream_tensors(wanted, staging, landing=landing, on_bytes=report)) as tensors:
        for tensor, values in tensors:
            model.load_weight(tensor.name, values)


def _now_and_then(on_progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """Pass progress on at most every `_PROGRESS_INTERVAL_S`, and when it is complete."""
    next_report = 0.0

    def report(done: int) -> None:
        nonlocal next_report
        now = time.monotonic()
        if now >= next_report or done == total:
            next_report = now + _PROGRESS_INTERVAL_S
            on_progress(done, total)

    return report
