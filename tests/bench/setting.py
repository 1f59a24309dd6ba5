"""What every measurement is given, and how it takes turns between us and the peer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.child import Child
from tests.bench.models import Model
from tests.bench.peer import Peer
from tests.bench.servers import OwnServer, PeerServer

OWN, PEER = "ours", "peer"

# Named values of one turn of one side.
Turn = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Setting:
    """The machine's part and ours; `say` is told what is being done."""

    models: tuple[Model, ...]
    peer: Peer
    rounds: int
    threads: int
    kernels: str
    compile_cache: str
    say: Callable[[str], None]

    @contextmanager
    def engines(self, model: Model, *, peer: bool = True) -> Generator[dict[str, Child]]:
        """Both engines in processes of their own; the peer's only where it is installed."""
        with ExitStack() as stack:
            own = [str(model.path), str(self.threads), self.kernels, self.compile_cache]
            children = {OWN: stack.enter_context(Child("tests.bench.own_engine", own))}
            if peer and self.peer.has_binding:
                other = [str(model.path), str(self.threads)]
                children[PEER] = stack.enter_context(Child("tests.bench.peer_engine", other))
            yield children

    def own_server(self, model: Model, *, context_tokens: int) -> OwnServer:
        """Our server, ready."""
        return OwnServer(
            model.path,
            threads=self.threads,
            kernels=self.kernels,
            compile_cache=self.compile_cache,
            context_tokens=context_tokens,
        )

    def peer_server(self, model: Model, *, context_tokens: int) -> PeerServer | None:
        """The peer's, ready; None if no program was named."""
        program: Path | None = self.peer.server
        if program is None:
            return None
        return PeerServer(program, model.path, threads=self.threads, context_tokens=context_tokens)

    def alternate(self, sides: Mapping[str, Turn]) -> dict[str, dict[str, float]]:
        """Runs the sides in turn, `rounds` times, whoever began last round ending this one.

        Returns:
            The medians of each side's values.
        """
        heard: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
        order = list(sides)
        for _ in range(self.rounds):
            for side in order:
                for name, value in sides[side]().items():
                    heard[side].setdefault(name, []).append(value)
            order.reverse()
        return {
            side: {name: statistics.median(values) for name, values in named.items()}
            for side, named in heard.items()
        }
