"""The sparse embedding pass against eager PyTorch: which tables it takes, which it leaves dense, and what it costs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from twinstep.spec.errors import DataError
from twinstep.worker.compile import StepCompiler
from twinstep.worker.compile.capture import Captured, capture
from twinstep.worker.compile.lower.inductor import InductorBackend
from twinstep.worker.compile.lower.xla import XlaBackend
from twinstep.worker.compile.state import TrainState
from twinstep.worker.compile.strategies import SparseEmbedding, resolve
from twinstep.worker.embedding.optim import RowWiseAdagrad
from twinstep.worker.ops.rows import sum_rows, unique_rows, write_rows

ROWS, DIM = 431, 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "rowwise": lambda p: RowWiseAdagrad(p, lr=0.05),
    "rowwise_decay": lambda p: RowWiseAdagrad(p, lr=0.05, weight_decay=0.1),
}
BACKENDS = [pytest.param("inductor", marks=pytest.mark.inductor), "xla"]
Optimizers = dict[str, torch.optim.Optimizer]


class Lookups(nn.Module):
    """One table looked up three ways: by F.embedding under a mask, by nn.Embedding again, and by indexing."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, DIM, **kwargs)
        self.first_order = nn.Parameter(torch.randn(ROWS))
        self.head = nn.Linear(DIM, 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        masked = torch.where((ids % 3 > 0).unsqueeze(-1), self.table(ids), 0.0)
        others = self.table(batch["others"]) + self.table.weight[batch["others"] - ROWS]
        return (self.head(masked).sum(1) + self.head(others).tanh().sum(1)).squeeze(-1) + self.first_order[ids].sum(1)


def make(model: nn.Module, kind: str) -> Optimizers:
    tables = [each for each in model.parameters() if each.shape[0] == ROWS]
    flat = [each for each in tables if each.dim() == 1]
    made = {
        "sparse": OPTIMIZERS[kind]([each for each in tables if each.dim() == 2]),
        "dense": torch.optim.SGD([each for each in model.parameters() if each.shape[0] != ROWS], lr=1e-2),
    }
    if flat:
        made["flat"] = torch.optim.Adagrad(flat, lr=0.1)
    return made


def step(model: nn.Module, optimizers: Optimizers, batch: Mapping[str, Tensor]) -> Tensor:
    for each in optimizers.values():
        each.zero_grad()
    loss = (model(batch) - batch["target"]).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for each in optimizers.values():
        each.step()
    return loss


def batch(seed: int, low: int = 0, high: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(low, high, (4, 5), generator=generator),
        "others": torch.randint(low, high, (4, 3), generator=generator),
        "target": torch.randn(4, generator=generator),
    }


def captured(model: nn.Module, optimizers: Any, given: Any, backend: str, train_step: Any = step) -> Captured:
    state = TrainState(model, optimizers)
    lowering: Any = {"inductor": InductorBackend, "xla": XlaBackend}[backend](state, cache_dir=None)
    decompositions = lowering.decompositions()
    strategies = resolve([SparseEmbedding()])
    return capture(train_step, state, optimizers, given, decompositions, backend=backend, strategies=strategies)


def of_all_rows(graph: fx.GraphModule, rows: int = ROWS) -> list[fx.Node]:
    """Nodes that hold something for every row of a table, but for the tables themselves, old and written to."""
    return [
        node
        for node in graph.graph.nodes
        if node.op == "call_function"
        and isinstance(node.meta["val"], Tensor)
        and rows in node.meta["val"].shape
        and node.target is not torch.ops.twinstep.write_rows.default
    ]


def notes(found: Captured) -> list[str]:
    return list(found.context.notes["sparse_embedding"].values())


@pytest.mark.parametrize("backend", ["inductor", "xla"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_value_of_all_rows_is_left_in_the_graph(kind: str, backend: str) -> None:
    model = Lookups()
    found = captured(model, make(model, kind), batch(0), backend)
    assert of_all_rows(found.graph) == []
    assert [note.split(":")[0] for note in notes(found)] == ["sparse", "sparse"]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("xla", kind) for kind in ("sgd", "adagrad", "rowwise")),
        *(pytest.param("inductor", kind, marks=pytest.mark.inductor) for kind in ("adagrad", "rowwise_decay")),
    ],
)
def test_twenty_steps_follow_eager(kind: str, backend: str) -> None:
    want, model = Lookups(padding_idx=7), Lookups(padding_idx=7)
    want_optimizers, optimizers = make(want, kind), make(model, kind)
    compiler = StepCompiler(step, model, optimizers, backend=backend)
    for seed in range(20):
        # Of few rows, so that most ids repeat; at times all are one.
        given = batch(seed, 5, 6 if seed % 4 == 3 else 17)
        want_loss = step(want, want_optimizers, given).detach()
        torch.testing.assert_close(compiler(given), want_loss, rtol=1e-4, atol=1e-6)
    compiler.pull()
    torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=1e-4, atol=1e-6)
    for name, each in optimizers.items():
        left, right = each.state_dict()["state"], want_optimizers[name].state_dict()["state"]
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
    fresh = Lookups(padding_idx=7)
    assert torch.equal(model.table.weight[17:], fresh.table.weight[17:])


class Bags(nn.Module):
    """Multi-hot features: bags of one length, and bags cut by offsets, empty ones and weighted ids among them."""

    def __init__(self, mode: str, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode = mode
        self.table = nn.EmbeddingBag(ROWS, DIM, mode=mode, **kwargs)
        self.head = nn.Linear(DIM, 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        cut = self.table(batch["ids"].flatten(), batch["offsets"])
        if self.mode == "sum":
            weights = torch.linspace(0.5, 1.5, 20).reshape(4, 5)
            cut = cut + self.table(batch["ids"], per_sample_weights=weights)
        return self.head(cut + self.table(batch["ids"])).squeeze(-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("mode", "kwargs"), [("sum", {}), ("mean", {}), ("mean", {"padding_idx": 7})])
def test_bags_follow_eager(mode: str, kwargs: dict[str, Any], backend: str) -> None:
    want, model = Bags(mode, **kwargs), Bags(mode, **kwargs)
    want_optimizers, optimizers = make(want, "adagrad"), make(model, "adagrad")
    compiler = StepCompiler(step, model, optimizers, backend=backend)
    for seed in range(4):
        given = {**batch(seed, 5, 17), "offsets": torch.tensor([0, 2, 2, 7])}
        want_loss = step(want, want_optimizers, given).detach()
        torch.testing.assert_close(compiler(given), want_loss, rtol=1e-4, atol=1e-6)
    compiler.pull()
    torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=1e-4, atol=1e-6)
    found = compiler.runner(given).captured
    assert of_all_rows(found.graph) == []
    assert notes(found)[0].startswith("sparse")


DENSE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "adam": (lambda p: torch.optim.Adam(p), "optimizer:optimizer/exp_avg/weight"),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "optimizer:optimizer/momentum_buffer/weight"),
    "decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), "parameter:weight"),
    "adagrad_decay": (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "optimizer:optimizer/sum/weight"),
    # 0 / (sqrt(0) + 0) is no number, in eager too: rows without a gradient would change.
    "no_eps": (lambda p: torch.optim.Adagrad(p, eps=0.0), "parameter:weight"),
}


def plain_step(model: nn.Module, optimizer: Any, ids: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(ids).square().sum()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("name", DENSE)
def test_an_optimizer_that_moves_unused_rows_stays_dense_and_says_so(name: str) -> None:
    make_optimizer, place = DENSE[name]
    table = nn.Embedding(ROWS, DIM)
    found = captured(table, make_optimizer(table.parameters()), torch.arange(5), "xla", plain_step)
    assert notes(found) == [
        f"dense: rows that no id names change too: momentum, weight decay or a running mean, seen in {place}"
    ]
    assert of_all_rows(found.graph)


def returns_gradient(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    plain_step(model, optimizer, ids)
    return model.weight.grad


def returns_table(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    plain_step(model, optimizer, ids)
    return model.weight.detach() + 0


def reads_again(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    plain_step(model, optimizer, ids)
    return model(ids).sum()


def regularises(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(ids).square().sum() + model.weight.square().sum()
    loss.backward()
    optimizer.step()
    return loss


def ties(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (model(ids) @ model.weight.T).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("train_step", [returns_gradient, returns_table, reads_again, regularises, ties])
def test_a_gradient_or_table_that_is_read_as_a_whole_stays_dense(train_step: Any) -> None:
    table = nn.Embedding(ROWS, DIM)
    found = captured(table, torch.optim.SGD(table.parameters(), lr=0.1), torch.arange(5), "xla", train_step)
    assert [note.split(":")[0] for note in notes(found)] == ["dense"]
    want = copy.deepcopy(table)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (table, want)]
    compiler = StepCompiler(train_step, table, optimizers[0], backend="xla")
    for _ in range(2):
        torch.testing.assert_close(
            compiler(torch.tensor([4, 4, 9])), train_step(want, optimizers[1], torch.tensor([4, 4, 9])).detach()
        )
    compiler.pull()
    torch.testing.assert_close(table.weight, want.weight)


def test_a_small_table_stays_dense() -> None:
    table = nn.Embedding(9, DIM)
    found = captured(table, torch.optim.SGD(table.parameters(), lr=0.1), torch.arange(9), "xla", plain_step)
    assert notes(found) == ["dense: 9 ids a step for 9 rows: all rows at once are cheaper"]


def test_tied_tables_are_one_table() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.users = nn.Embedding(ROWS, DIM)
            self.items = nn.Embedding(ROWS, DIM)
            self.items.weight = self.users.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.users(ids) * self.items(ids.flip(0)).tanh()

    models = [Tied(), Tied()]
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1) for each in models]
    compiler = StepCompiler(plain_step, models[0], optimizers[0], backend="xla")
    for seed in range(3):
        ids = torch.randint(20, (8,), generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(compiler(ids), plain_step(models[1], optimizers[1], ids).detach())
    compiler.pull()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-4, atol=1e-6)
    assert of_all_rows(compiler.runner(ids).captured.graph) == []


CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "inf": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")),
    "l1": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=False),
}


@pytest.mark.parametrize(
    ("backend", "clips"), [("xla", list(CLIPS)), pytest.param("inductor", ["inf"], marks=pytest.mark.inductor)]
)
def test_every_clip_of_a_tables_gradient_follows_eager(backend: str, clips: list[str]) -> None:
    def clipped(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
        loss = torch.zeros(())
        for name, table in model.items():
            optimizer.zero_grad()
            one = table(ids).square().sum()
            one.backward()
            CLIPS[name](table)
            optimizer.step()
            loss = loss + one
        return loss

    def tables() -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict({name: nn.Embedding(ROWS, DIM) for name in clips})

    models = [tables(), tables()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    compiler = StepCompiler(clipped, models[0], optimizers[0], backend=backend)
    for seed in range(3):
        ids = torch.randint(20, (8,), generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(compiler(ids), clipped(models[1], optimizers[1], ids).detach())
    compiler.pull()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-5, atol=1e-6)
    assert of_all_rows(compiler.runner(ids).captured.graph) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_outside_of_the_table_writes_to_no_row(backend: str) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, DIM)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    compiler = StepCompiler(plain_step, table, optimizer, backend=backend)
    for bad in (ROWS, -1, -ROWS - 1, 10**6):
        before = table.weight.detach().clone()
        with pytest.raises(DataError, match="rows 0…"):
            compiler(torch.tensor([3, bad, 5]))
        compiler.pull()
        assert torch.equal(table.weight, before)


IDS = st.lists(st.integers(-4, 14), min_size=1, max_size=30)


@given(ids=IDS, width=st.integers(1, 5))
def test_the_operators_add_up_each_row_once_and_write_no_other(ids: list[int], width: int) -> None:
    given_ids, values = torch.tensor(ids), torch.randn(len(ids), width)
    rows, order, offsets = unique_rows(given_ids, 11)
    inside = sorted({each for each in ids if 0 <= each < 11})
    assert rows[: len(inside)].tolist() == inside
    assert (rows[len(inside) :] >= 11).all()
    assert len(set(rows.tolist())) == len(ids)
    want = torch.full((11, width), 100.0)
    for row in inside:
        want[row] = values[given_ids == row].sum(0)
    sums = sum_rows(values, order, offsets)
    torch.testing.assert_close(write_rows(torch.full((11, width), 100.0), rows, sums), want)
    assert not sums[len(inside) :].any()


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A compiled step with Adagrad, and eager's; the state of either is set before each use."""
    tables = [nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)]
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1) for each in tables]
    compiler = StepCompiler(plain_step, tables[0], optimizers[0], backend="xla")
    return (tables, optimizers), compiler


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.one_of(st.integers(0, ROWS - 1), st.integers(0, 3)), min_size=12, max_size=12))
def test_any_ids_follow_eager_and_leave_other_rows_bit_equal(pair: Any, ids: list[int]) -> None:
    (tables, optimizers), compiler = pair
    with torch.no_grad():
        tables[0].weight.copy_(tables[1].weight)
    before = tables[1].weight.detach().clone()
    given_ids = torch.tensor(ids)
    loss = compiler(given_ids)
    torch.testing.assert_close(loss, plain_step(tables[1], optimizers[1], given_ids).detach())
    compiler.pull()
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-5, atol=1e-6)
    others = torch.ones(ROWS, dtype=torch.bool)
    others[given_ids] = False
    assert torch.equal(tables[0].weight[others], before[others])


def test_an_xla_step_needs_no_memory_for_unused_rows() -> None:
    temporary = []
    for rows in (1_000, 100_000):
        table = nn.Embedding(rows, DIM)
        optimizer = torch.optim.Adagrad(table.parameters())
        compiler = StepCompiler(plain_step, table, optimizer, backend="xla")
        compiler(torch.arange(7))
        program: Any = compiler.runner(torch.arange(7))
        memory = program._program.compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * rows * DIM * 4
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.inductor
def test_an_inductor_step_writes_no_table() -> None:
    """Nothing of a table's size is allocated while a step runs: a table of 200 MB, and Linux' own count of the peak."""
    table = nn.Embedding(800_000, 64)
    optimizer = torch.optim.Adagrad(table.parameters())
    compiler = StepCompiler(plain_step, table, optimizer, backend="inductor")
    compiler(torch.arange(7))
    with torch.profiler.profile(profile_memory=True) as profile:
        compiler(torch.arange(7))
    assert max(each.self_cpu_memory_usage for each in profile.events()) < 1 << 20
