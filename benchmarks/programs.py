"""Programs: described first, then compiled, all of them and several at a time."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

COMPILER_OPTIONS: dict[str, Any] = {}  # none; tests want to compile fast


class Source(NamedTuple):
    """A function that `jax.jit` has wrapped, and what it is to be compiled for."""

    step: Any
    args: tuple[Any, ...]  # arrays or their types
    # Bytes of arguments beyond parameters, optimizer state and rows: sums, means.
    beside: int = 0
    # Sources of one name, whatever the method and N, are the same program.
    shared: str | None = None


class Recipe(NamedTuple):
    """One way to take a window, not yet compiled."""

    sources: dict[str, Source]
    carry: Any  # at the start: parameters, optimizer state
    # (compiled functions by name, carry) -> carry; consumes the carry's buffers
    window: Callable[[dict[str, Callable], Any], Any]


class Program(NamedTuple):
    """A compiled function, and what the compiler says about it."""

    run: Callable
    costs: dict[str, float]  # seconds to make it, bytes to run it


class Method(NamedTuple):
    """One way to take a window."""

    programs: dict[str, Program]
    carry: Any
    window: Callable[[Any], Any]  # from carry to carry; consumes its buffers


def compile_methods(
    recipes: dict[str, Recipe],
    jobs: int = 1,
    shared: dict[str, Program] | None = None,
) -> dict[str, Method]:
    """Compiles every program once, `jobs` at a time.

    Args:
      recipes: of each method.
      jobs: with more than one, programs wait for each other, and their seconds say
        little.
      shared: programs that are there already, by their shared names. New ones are
        added.
    """
    shared = {} if shared is None else shared
    sources = {
        source.shared or f"{method}: {name}": source
        for method, recipe in recipes.items()
        for name, source in recipe.sources.items()
    }
    new = {key: source for key, source in sources.items() if key not in shared}
    if jobs == 1:
        programs = {key: compile_cold(source) for key, source in new.items()}
    else:
        # Traced one after another in this thread, whose settings of JAX count.
        with ThreadPoolExecutor(jobs) as pool:
            coming = {k: pool.submit(finish, *trace(s)) for k, s in new.items()}
        programs = {key: program.result() for key, program in coming.items()}
    shared |= {key: programs[key] for key in new if new[key].shared}

    def build(method, recipe):
        mine = {
            name: (shared | programs)[source.shared or f"{method}: {name}"]
            for name, source in recipe.sources.items()
        }
        runs = {name: program.run for name, program in mine.items()}
        return Method(mine, recipe.carry, functools.partial(recipe.window, runs))

    return {method: build(method, recipe) for method, recipe in recipes.items()}


def compile_cold(source: Source) -> Program:
    """Compiles with no trace cached in this process."""
    jax.clear_caches()
    return finish(*trace(source))


def trace(source: Source) -> tuple[Any, dict[str, float]]:
    begin = time.perf_counter()
    lowered = source.step.lower(*source.args)
    seconds = time.perf_counter() - begin
    return lowered, {"trace_seconds": seconds, "beside_bytes": source.beside}


def finish(lowered: Any, costs: dict[str, float]) -> Program:
    begin = time.perf_counter()
    compiled = lowered.compile(COMPILER_OPTIONS)
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    costs = costs | {
        "compile_seconds": seconds,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        # Of the arguments, those whose buffers the results take over.
        "alias_bytes": memory.alias_size_in_bytes,
    }
    return Program(compiled, costs)


def size_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
