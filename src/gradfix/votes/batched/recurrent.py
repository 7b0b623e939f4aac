"""Recurrent layers spelled out: torch runs one as a single call, of which no weight's gradient can be taken by sample.

Here the same layer is a product per step, each of which a vote rule covers. What comes out is equal up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, Sequence[Tensor]], State]  # gates of the input, state, recurrent weights


def _lstm_step(gates: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    hidden, cell = state
    kept, bias, *projection = weights
    inward, forget, new, out = (gates + _linear(hidden, kept, bias)).chunk(4, -1)
    cell = forget.sigmoid() * cell + inward.sigmoid() * new.tanh()
    hidden = out.sigmoid() * cell.tanh()
    return (F.linear(hidden, projection[0]) if projection else hidden), cell


def _gru_step(gates: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    (hidden,) = state
    reset, update, new = gates.chunk(3, -1)
    own_reset, own_update, own_new = _linear(hidden, *weights[:2]).chunk(3, -1)
    update = (update + own_update).sigmoid()
    new = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return (new + update * (hidden - new),)


def _plain_step(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda gates, state, weights: (activation(gates + _linear(state[0], *weights[:2])),)


def _linear(data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(data, weight, bias)


CELLS: dict[Any, Cell] = {
    torch.lstm: _lstm_step,
    torch.gru: _gru_step,
    torch.rnn_tanh: _plain_step(torch.tanh),
    torch.rnn_relu: _plain_step(torch.relu),
}


def spelled_out(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The same call in plain products; None for calls that are not spelled out."""
    if function is torch.lstm_cell or function == torch.lstm_cell:
        return lambda: _single_step(*args, **kwargs)
    cell = CELLS.get(function)
    if cell is None or kwargs or len(args) not in (8, 9):
        return None
    packed = not isinstance(args[3], bool)
    has_biases, layers, dropout, train, *_ = args[4:] if packed else args[3:]
    if (train and dropout) or (not packed and args[0].ndim != 3):
        return None
    layer_weights = _by_layer(args[3] if packed else args[2], has_biases, layers * (1 + args[-1 if packed else 7]))
    return lambda: (_packed if packed else _whole)(cell, args, layer_weights)


def _single_step(data: Tensor, state: State, enter: Tensor, keep: Tensor, b: Any = None, c: Any = None) -> State:
    return _lstm_step(_linear(data, enter, b), tuple(state), (keep, c))  # type: ignore[arg-type]


def _by_layer(weights: Sequence[Tensor], has_biases: bool, count: int) -> list[list[Any]]:
    """Per layer and direction: input weight and bias, recurrent weight and bias, and a projection where there is one."""
    size = len(weights) // count
    found = []
    for first in range(0, len(weights), size):
        enter, keep, *rest = weights[first : first + size]
        biases, projection = (rest[:2], rest[2:]) if has_biases else ([None, None], rest)
        found.append([enter, biases[0], keep, biases[1], *projection])
    return found


def _states(initial: Any, number: int) -> State:
    return tuple(part[number] for part in (initial if isinstance(initial, (tuple, list)) else (initial,)))


def _results(output: Tensor, last: Sequence[State]) -> tuple[Tensor, ...]:
    return output, *(torch.stack(parts) for parts in zip(*last))


def _whole(cell: Cell, args: Sequence[Any], weights: list[list[Any]]) -> tuple[Tensor, ...]:
    data, initial, _, _, layers, _, _, both_ways, batch_first = args
    data = data.transpose(0, 1) if batch_first else data
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for way in range(1 + both_ways):
            enter, bias, *recurrent = weights[layer * (1 + both_ways) + way]
            gates, state = _linear(data, enter, bias), _states(initial, len(last))
            steps = []
            for gate in reversed(gates.unbind()) if way else gates.unbind():
                state = cell(gate, state, recurrent)
                steps.append(state[0])
            outputs.append(torch.stack(steps[::-1] if way else steps))
            last.append(state)
        data = torch.cat(outputs, -1) if both_ways else outputs[0]
    return _results(data.transpose(0, 1) if batch_first else data, last)


def _packed(cell: Cell, args: Sequence[Any], weights: list[list[Any]]) -> tuple[Tensor, ...]:
    """Samples of several lengths, longest first; a step holds those that are still going."""
    data, sizes, initial, _, _, layers, _, _, both_ways = args
    sizes = sizes.tolist()
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for way in range(1 + both_ways):
            enter, bias, *recurrent = weights[layer * (1 + both_ways) + way]
            gates, start = _linear(data, enter, bias).split(sizes), _states(initial, len(last))
            run = _backwards if way else _forwards
            steps, state = run(lambda gate, state, own=recurrent: cell(gate, state, own), gates, start)
            outputs.append(torch.cat(steps))
            last.append(state)
        data = torch.cat(outputs, -1) if both_ways else outputs[0]
    return _results(data, last)


def _forwards(step: Any, gates: Sequence[Tensor], state: State) -> tuple[list[Tensor], State]:
    steps, ended = [], []
    for gate in gates:
        if len(gate) < len(state[0]):
            ended.append(tuple(part[len(gate) :] for part in state))
            state = tuple(part[: len(gate)] for part in state)
        state = step(gate, state)
        steps.append(state[0])
    return steps, tuple(torch.cat(parts) for parts in zip(state, *reversed(ended)))


def _backwards(step: Any, gates: Sequence[Tensor], start: State) -> tuple[list[Tensor], State]:
    steps: list[Tensor] = []
    state = tuple(part[:0] for part in start)
    for gate in reversed(gates):
        begin = len(state[0])
        if len(gate) > begin:
            state = tuple(torch.cat([part, first[begin : len(gate)]]) for part, first in zip(state, start))
        state = step(gate, state)
        steps.append(state[0])
    return steps[::-1], state
