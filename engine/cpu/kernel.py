"""`Kernel`: one function of a program, named, so that it need not be compiled where it was compiled before.

Every kernel of a program has the C signature `void (arguments, step, rank, team_size)`, all int64: `arguments` is the
address of the instruction's own int64 numbers (`engine.cpu.program`), `step` of the step's (`engine.cpu.step`).  All
threads of the team call it; together they do the work once.  `engine.cpu.catalogue` lists the kernels,
`engine.cpu.code_cache` gives their addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ENTRY = "kernel"
"""The one symbol that a kernel's object code defines for others."""

Body = Callable[..., None]
"""What is compiled: a function of int64 numbers that returns nothing."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The body that `factory`, a function of the module, makes of `constants`, which are known when it is compiled."""

    module: str
    factory: str
    constants: tuple[int, ...] = ()
    num_parameters: int = 4

    @property
    def name(self) -> str:
        return self.factory

    @property
    def file_name(self) -> str:
        """Tells kernels apart on disk."""
        numbers = "".join(f"-{int(constant)}" for constant in self.constants)
        return f"{self.module.rpartition('.')[2]}.{self.factory}{numbers}.code"
