"""Which implementation of an operation runs, chosen by declared constraints, with a reason for each refusal.

An operation is one piece of work with an eager twin of the same name in this package. Kernels register further
implementations from outside; nothing here imports them. The operations and their eager twins:

    decode_layer   operations.decode_layer(method, pieces, keys, values)
    attend_packed  operations.attend_packed(queries, pieces, method, attention, read)
    encode_span    operations.encode_span(method, k, v, stats, state)
    second_moment  query_stats.second_moment(queries, total)

Facts describe one call in plain values. Names in use: device ("cuda"), capability ((9, 0)), dtype, method, key_bits,
value_bits, head_dim, group_size, rank, jensen, rotated (some keys are stored before RoPE), batch, heads, tokens. A rule
about a fact that a caller does not know passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol

import torch

from .settings import CacheSettings

logger = logging.getLogger(__name__)

EAGER = "torch"


class NoCapableBackend(ValueError):
    """A backend was asked for by name and cannot do an operation; the message says why."""


class Rule(Protocol):
    """A constraint on one fact."""

    def refusal(self, name: str, value: Any) -> str | None:
        """Why `value` is refused, or None."""


@dataclass(frozen=True)
class OneOf:
    """The fact is one of some values."""

    allowed: tuple

    def refusal(self, name: str, value: Any) -> str | None:
        return None if value in self.allowed else f"{name} is {value}, not {' or '.join(map(str, self.allowed))}"


@dataclass(frozen=True)
class Between:
    """The fact lies in a range, ends included; tuples (a compute capability) compare in order."""

    low: Any
    high: Any = None

    def refusal(self, name: str, value: Any) -> str | None:
        if value < self.low:
            return f"{name} is {value}, below {self.low}"
        if self.high is not None and value > self.high:
            return f"{name} is {value}, above {self.high}"
        return None


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    failures: exceptions that mean "this kernel cannot run here", not "wrong input".
    explain: facts of a call -> what the implementation decides by itself for such calls, for the record.
    """

    operation: str
    backend: str
    run: Callable
    constraints: Mapping[str, Rule] = field(default_factory=dict)
    priority: int = 0
    failures: tuple[type[Exception], ...] = ()
    explain: Callable[[Mapping[str, Any]], str] | None = None

    def refusals(self, facts: Mapping[str, Any]) -> list[str]:
        """Reasons why it cannot take a call with these facts; empty when it can."""
        checks = ((name, rule, facts[name]) for name, rule in self.constraints.items() if name in facts)
        return [reason for name, rule, value in checks if (reason := rule.refusal(name, value))]


@dataclass(frozen=True)
class Choice:
    """What runs, and why the others do not."""

    implementation: Implementation
    reasons: tuple[str, ...] = ()


_implementations: dict[str, list[Implementation]] = {}
_unavailable: dict[str, str] = {}
_switched_off: set[str] = set()
_failed: dict[tuple, str] = {}
# Goes up whenever what is above changes, so that a choice made before counts no longer.
_changes = count()
_state = next(_changes)


def _changed() -> None:
    global _state
    _state = next(_changes)


def register(
    operation: str,
    backend: str,
    constraints: Mapping[str, Rule] | None = None,
    priority: int = 0,
    failures: tuple[type[Exception], ...] = (),
    explain: Callable[[Mapping[str, Any]], str] | None = None,
) -> Callable[[Callable], Callable]:
    """Decorator: the function is `backend`'s implementation of `operation` and takes the eager twin's arguments."""

    def add(run: Callable) -> Callable:
        entry = Implementation(operation, backend, run, constraints or {}, priority, failures, explain)
        known = _implementations.setdefault(operation, [])
        # A module that is imported again (a reload) replaces what it registered before.
        known[:] = [i for i in known if (i.backend, i.run.__qualname__) != (backend, run.__qualname__)] + [entry]
        known.sort(key=lambda i: -i.priority)
        _changed()
        return run

    return add


def eager(function: Callable) -> Callable:
    """Decorator: the function is the eager twin, and its name the operation's."""
    return register(function.__name__, EAGER, priority=-1)(function)


def mark_unavailable(backend: str, reason: str) -> None:
    """A backend that could not be loaded at all; `reason` is given wherever it would have been considered."""
    _unavailable[backend] = reason
    _changed()


def registered(operation: str) -> tuple[Implementation, ...]:
    """Implementations of an operation, best first."""
    return tuple(_implementations.get(operation, ()))


@contextmanager
def only_eager(*operations: str) -> Iterator[None]:
    """Within, these operations run their eager twins (to measure what a kernel brings)."""
    before = set(_switched_off)
    _switched_off.update(operations)
    _changed()
    try:
        yield
    finally:
        _switched_off.clear()
        _switched_off.update(before)
        _changed()


def device_facts(device: torch.device) -> dict[str, Any]:
    """What a device is, for constraints."""
    if device.type != "cuda":
        return {"device": device.type}
    if torch.version.hip:
        return {"device": "rocm"}
    return {"device": "cuda", "capability": torch.cuda.get_device_capability(device)}


def settings_facts(settings: CacheSettings) -> dict[str, Any]:
    """What the settings fix for a whole run, for constraints."""
    names = ("method", "key_bits", "value_bits", "group_size", "rank", "candidates", "jensen")
    return {name: getattr(settings, name) for name in names}


@lru_cache(maxsize=1024)
def _facts_of(
    settings: CacheSettings, shape: tuple, dtype: torch.dtype, device: torch.device, rotated: bool
) -> Mapping[str, Any]:
    sizes = dict(zip(("batch", "tokens", "heads", "head_dim"), shape, strict=True))
    rest = {"dtype": dtype, "rotated": rotated} | device_facts(device)
    return MappingProxyType(settings_facts(settings) | sizes | rest)


def call_facts(settings: CacheSettings, like: torch.Tensor, rotated: bool = False) -> Mapping[str, Any]:
    """What backends are chosen by, for a call on tensors `[B, S, H, D]`."""
    # torch.compile looks through a cache, and warns that it does.
    facts = _facts_of.__wrapped__ if torch.compiler.is_compiling() else _facts_of
    return facts(settings, tuple(like.shape), like.dtype, like.device, rotated)


def choose(operation: str, setting: str, facts: Mapping[str, Any], required: bool = False) -> Choice:
    """The best implementation for a call.

    Args:
        setting: "auto", "torch" (eager only), or a backend by name.
        required: with a backend by name, no falling back to the eager twin.

    Raises:
        NoCapableBackend: when a required backend cannot take the call.
    """
    reasons = []
    for entry in _implementations.get(operation, ()):
        if entry.backend == EAGER:
            continue
        refusals = _refusals(entry, setting, facts)
        if not refusals:
            return Choice(entry, tuple(reasons))
        reasons.append(f"{entry.backend}: {', '.join(refusals)}")
    wanted = None if setting in ("auto", EAGER) else setting
    if setting != EAGER:
        reasons += [f"{name}: {why}" for name, why in _unavailable.items() if wanted in (None, name)]
    if wanted and required:
        why = "; ".join(reasons) or f"{wanted}: no kernel for it is installed"
        raise NoCapableBackend(f"backend {wanted!r} cannot do {operation} here ({why}). Set backend to auto.")
    for entry in _implementations.get(operation, ()):
        if entry.backend == EAGER:
            return Choice(entry, tuple(reasons))
    raise KeyError(f"operation {operation!r} has no eager twin")


def _refusals(entry: Implementation, setting: str, facts: Mapping[str, Any]) -> list[str]:
    if setting not in ("auto", entry.backend):
        return [f"backend is set to {setting}"]
    if entry.operation in _switched_off:
        return ["switched off"]
    failed = _failed and _failed.get(_failure_key(entry, facts))
    return [failed] if failed else entry.refusals(facts)


def _failure_key(entry: Implementation, facts: Mapping[str, Any]) -> tuple:
    # Lengths change from call to call; a kernel that failed for one will fail for the next.
    stable = sorted((name, str(value)) for name, value in facts.items() if name != "tokens")
    return entry.operation, entry.backend, entry.run.__qualname__, tuple(stable)


class Dispatcher:
    """Runs operations for one run as its backend setting says, and remembers what really ran and why."""

    def __init__(self, setting: str = "auto") -> None:
        self.setting = setting
        self._last: dict[str, tuple[Choice, Mapping[str, Any]]] = {}
        # Thousands of calls a run are alike.
        self._choices: dict[str, tuple[int, Mapping[str, Any], Choice]] = {}

    def run(self, operation: str, facts: Mapping[str, Any], *args, **kwargs) -> Any:
        """Call the chosen implementation. One that fails to launch is replaced by the next, with one warning."""
        while True:
            choice = self._choose(operation, facts)
            entry = choice.implementation
            self._last[operation] = choice, facts
            try:
                return entry.run(*args, **kwargs)
            except entry.failures as error:
                # Running out of memory is the host's to handle: it frees memory and tries again.
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                reason = f"failed to launch ({type(error).__name__}: {str(error).strip()[:200]})"
                _failed[_failure_key(entry, facts)] = reason
                _changed()
                logger.warning("QuantWM: %s of %s %s; going on without it.", operation, entry.backend, reason)

    def _choose(self, operation: str, facts: Mapping[str, Any]) -> Choice:
        """`choose`, or what it gave for the same facts a moment ago."""
        state, known, choice = self._choices.get(operation, (None, None, None))
        if state != _state or known is not facts:
            choice = choose(operation, self.setting, facts)
            self._choices[operation] = _state, facts, choice
        return choice

    def summary(self) -> tuple[str, str]:
        """What ran, in a word or two, and the reasons in a sentence, for the run's record."""
        backends = {choice.implementation.backend for choice, _ in self._last.values()}
        told = []
        for operation, (choice, facts) in self._last.items():
            entry = choice.implementation
            decided = (entry.explain(facts),) if entry.explain else ()
            why = "; ".join(filter(None, (*choice.reasons, *decided)))
            told.append(f"{operation} {entry.backend}" + (f" ({why})" if why else ""))
        return "+".join(sorted(backends, key=lambda name: name == EAGER)) or EAGER, "; ".join(told)
