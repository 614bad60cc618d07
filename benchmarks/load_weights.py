"""How fast do weights reach the device?  GB/s of the loader's stream, beside two yardsticks.

    python benchmarks/load_weights.py [--gib 4] [--directory DIR] [--device cuda] [--cold]

Writes a safetensors file of random values with the tensor sizes of an 8B model, so it is in the page cache,
then measures in turns: reading the file into host memory and no further; `copy_` from the memory map to the
device, tensor by tensor; the loader's stream.  The best of the rounds counts.  With --cold the file is also
streamed once after the system was asked to drop it from the page cache.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from engine.loading.read_plan import plan_pieces
from engine.loading.safetensors_checkpoint import SafetensorsCheckpoint
from engine.loading.staging import NUM_BUFFERS, PIECE_BYTES, CudaStaging, Staging
from engine.loading.weight_stream import NUM_READERS, read_pieces, stream_tensors

LAYER_SHAPES = ((4096,), (6144, 4096), (4096, 4096), (4096,), (14336, 4096), (14336, 4096), (4096, 14336))
RANDOM_BLOCK_BYTES = 64 * 2**20


def write_checkpoint(directory: Path, num_bytes: int) -> None:
    """A bfloat16 checkpoint of about `num_bytes`; one block of random bytes fills it over and over."""
    header: dict[str, dict[str, object]] = {}
    offset = 0
    while offset < num_bytes:
        shape = LAYER_SHAPES[len(header) % len(LAYER_SHAPES)]
        end = offset + 2 * torch.Size(shape).numel()
        header[f"tensor.{len(header)}"] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    block = torch.randint(0, 256, (RANDOM_BLOCK_BYTES,), dtype=torch.uint8).numpy().data
    (directory / "config.json").write_text('{"dtype": "bfloat16"}')
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, offset, RANDOM_BLOCK_BYTES):
            file.write(block[: offset - start])
        file.flush()
        os.fsync(file.fileno())


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Seconds until the device has everything."""
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, object]:
    device = torch.device(arguments.device)
    started = time.perf_counter()
    write_checkpoint(directory, int(arguments.gib * 2**30))
    print(f"wrote the file in {time.perf_counter() - started:.1f} s", flush=True)
    checkpoint = SafetensorsCheckpoint(directory)
    stored = checkpoint.stored_tensors()
    parameters = {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in stored}

    def new_staging(target: torch.device) -> Staging:
        kind = CudaStaging if target.type == "cuda" else Staging
        return kind(target, piece_bytes=arguments.piece_mib * 2**20, num_buffers=arguments.buffers)

    def read() -> None:
        with new_staging(torch.device("cpu")) as staging:
            for _ in read_pieces(plan_pieces(stored, staging.piece_bytes), staging, arguments.readers):
                pass

    def copy_mapped() -> None:
        for name, values in checkpoint.tensors():
            parameters[name].copy_(values)

    def stream() -> None:
        with (
            new_staging(device) as staging,
            closing(
                stream_tensors(
                    stored,
                    staging,
                    landing=lambda tensor: parameters[tensor.name],
                    num_readers=arguments.readers,
                )
            ) as tensors,
        ):
            for _ in tensors:
                pass

    gigabytes = checkpoint.num_bytes / 1e9
    rates: dict[str, float] = {}
    for _ in range(arguments.rounds):
        for name, run in (("read", read), ("mapped", copy_mapped), ("streamed", stream)):
            rate = gigabytes / timed(run, device)
            rates[name] = max(rates.get(name, 0.0), rate)
            print(f"{name:9} {rate:6.2f} GB/s", flush=True)
    for name, values in checkpoint.tensors():
        if not torch.equal(parameters[name].cpu().view(torch.int16), values.view(torch.int16)):
            raise SystemExit(f"{name} differs from the file")
    if arguments.cold:
        with (directory / "model.safetensors").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        rates["cold"] = gigabytes / timed(stream, device)
        print(f"cold      {rates['cold']:6.2f} GB/s", flush=True)
    return {
        "benchmark": "load_weights",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "gb": round(gigabytes, 2),
        "piece_mib": arguments.piece_mib,
        "buffers": arguments.buffers,
        "readers": arguments.readers,
        **{f"{name}_gb_per_s": round(rate, 2) for name, rate in rates.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="GB/s from a safetensors file to the device.")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--directory", type=Path, help="where to write the file; by default the temporary directory")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--piece-mib", type=int, default=PIECE_BYTES // 2**20)
    parser.add_argument("--buffers", type=int, default=NUM_BUFFERS)
    parser.add_argument("--readers", type=int, default=NUM_READERS)
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        print(json.dumps(measure(arguments, Path(directory))))


if __name__ == "__main__":
    main()
