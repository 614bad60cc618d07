"""The worker process: one engine behind a ZeroMQ socket, started by the daemon's supervisor.

    python -P -m engine.worker --connect ipc://ADDRESS

Reads `Start`, loads the model (`Progress`...), answers `Ready` or `Fatal`, then serves
`Submit` and `Abort`, and the calls that change what memory it holds, until `Shutdown`.
While idle it blocks on the socket and uses no CPU.  It exits by itself when its standard
input closes, which happens when the daemon that holds the other end dies, however it dies.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import signal
import sys
import threading
import time

import zmq

from engine.api import wire
from engine.api.errors import EngineError
from engine.api.output import StepOutput
from engine.engine import Engine, open_engine

log = logging.getLogger("engine.worker")

QUIET_MS = 300
"""How long nothing must have arrived before time is spent on preparations, which hold up a request."""


REPORT_INTERVAL_S = 1.0
"""While it works it says at least so often how far it is, also when a long prompt has no token yet: a worker that says
nothing for long counts as stuck."""


class Worker:
    """Moves frames between the socket and the engine, on one thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def run(self) -> int:
        """Serve until told to stop; returns the exit code of the process."""
        try:
            start = wire.decode_to_worker(self._socket.recv())
            if not isinstance(start, wire.Start) or start.wire_version != wire.WIRE_VERSION:
                raise EngineError("The worker and the daemon are of different versions; restart the daemon.")
            engine = open_engine(start.config, self._report_progress)
        except EngineError as error:
            log.error("cannot load the model: %s", error.message)
            self._send(wire.Fatal(error.code, error.message))
            return 1
        except Exception as error:
            log.exception("cannot load the model")
            self._send(wire.Fatal(EngineError.code, f"The model could not be loaded ({error}); see the worker's log."))
            return 1
        self._send(wire.Ready(engine.facts))
        try:
            self._serve(engine)
        except Exception as error:
            log.exception("the engine failed")
            self._send(wire.Fatal(EngineError.code, f"The engine failed ({error}); see the worker's log."))
            return 1
        return 0

    def _serve(self, engine: Engine) -> None:
        report_due_at = math.inf
        while True:
            while self._socket.poll(_patience_ms(engine)):
                frame = wire.decode_to_worker(self._socket.recv())
                if isinstance(frame, wire.Shutdown):
                    return
                outputs = self._handle(engine, frame)
                if outputs:
                    self._send(wire.Steps(tuple(outputs), engine.stats()))
            if not engine.has_work:
                engine.spare_step()
                report_due_at = math.inf
                continue
            outputs = engine.step()
            now = time.monotonic()
            if outputs or now >= report_due_at:
                self._send(wire.Steps(tuple(outputs), engine.stats()))
                report_due_at = math.inf
            report_due_at = min(report_due_at, now + REPORT_INTERVAL_S)

    def _handle(self, engine: Engine, frame: wire.ToWorker) -> list[StepOutput]:
        """Apply one frame; returns the terminal outputs it causes."""
        outputs: list[StepOutput] = []
        if isinstance(frame, wire.Submit):
            for prompt in frame.prompts:
                try:
                    engine.submit(prompt)
                except EngineError as error:
                    outputs.append(StepOutput(prompt.sequence_id, finish_reason="error", error_message=error.message))
        elif isinstance(frame, wire.Abort):
            aborted = (engine.abort(sequence_id) for sequence_id in frame.sequence_ids)
            outputs.extend(output for output in aborted if output is not None)
        elif isinstance(frame, wire.ResizeCache | wire.Sleep | wire.Wake):
            self._send(_call(engine, frame))
        return outputs

    def _report_progress(self, stage: str, done: int, total: int) -> None:
        self._send(wire.Progress(stage, done, total))

    def _send(self, frame: wire.FromWorker) -> None:
        self._socket.send(wire.encode(frame))


def _call(engine: Engine, frame: wire.ResizeCache | wire.Sleep | wire.Wake) -> wire.Memory | wire.Refused:
    """Change what memory is held; returns the answer.

    Any error but `EngineError` leaves nothing to be said of the engine, and ends the worker, which answers all calls.
    """
    started = time.perf_counter()
    try:
        match frame:
            case wire.ResizeCache():
                memory = engine.resize_cache(frame.num_blocks)
            case wire.Sleep():
                memory = engine.sleep()
            case wire.Wake():
                memory = engine.wake(frame.num_blocks)
    except EngineError as error:
        log.warning("%s was refused: %s", type(frame).__name__, error.message)
        return wire.Refused(frame.call_id, error.code, error.message)
    log.info("%s took %.3f s: %s", type(frame).__name__, time.perf_counter() - started, memory)
    return wire.Memory(frame.call_id, memory)


def _patience_ms(engine: Engine) -> int | None:
    """How long to wait for a frame: not at all with work at hand, a moment with spare work, else for ever."""
    if engine.has_work:
        return 0
    return QUIET_MS if engine.has_spare_work else None


def main() -> int:
    parser = argparse.ArgumentParser(description="One Quire engine; started by the daemon.")
    parser.add_argument("--connect", required=True, metavar="ENDPOINT", help="ZeroMQ endpoint of the daemon")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    # What the imports made stays for good; going through it takes longer than many steps together.
    gc.freeze()

    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(arguments.connect)
    try:
        return Worker(socket).run()
    finally:
        socket.close(linger=2000)
        context.term()


def _exit_with_parent() -> None:
    """Wait for the end of standard input, then leave at once: nobody is there to read an answer."""
    # Not through sys.stdin, whose lock the interpreter needs when it shuts down.
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
