"""Each process of a run calls a user's factory by itself: what they make is held to be the same."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinstep.spec.errors import TrainError
from twinstep.spec.job import JobSpec
from twinstep.spec.parse import validate_spec
from twinstep.worker.data.datasets import load_dataset
from twinstep.worker.embedding.collection import tables_of
from twinstep.worker.train.declared import build, declares, has_declared
from twinstep.worker.train.processes import Process, Together

TEXT = """
import itertools, random
import numpy as np
import torch
from torch import nn

CALLS = itertools.count()

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tables = config.embedding_collection()
        self.register_buffer("flags", torch.zeros(0, dtype=torch.bool))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        CHANGE
"""
COUNT = itertools.count()


class Two(Together):
    """A process of two, to whom the other one shows `other`: what itself showed, one call before."""

    def __init__(self) -> None:
        super().__init__(Process(rank=0, count=2))
        self.shown: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.shown.append(value)
        return self.shown[-2:]


def spec_of(folder: Path, change: str) -> JobSpec:
    package = f"alike_{next(COUNT)}"
    (folder / f"{package}.py").write_text(TEXT.replace("CHANGE", change))
    return validate_spec(
        {
            "name": "t",
            "model": {"kind": "module", "factory": f"{package}:Model", "source": str(folder), "embedding_dim": 4},
            "data": {"dataset": "synthetic", "synthetic_events": 400, "batch_size": 4, "uih_len": 8},
        }
    )


def build_twice(spec: JobSpec) -> None:
    together, schema = Two(), load_dataset(spec.data).schema
    build(spec, schema, together)
    build(spec, schema, together)
    assert len(together.shown) == 2


def test_a_module_fills_its_tables_itself_so_that_each_process_has_them_whole(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "pass")
    spec = spec.model_copy(update={"compile": spec.compile.model_copy(update={"backend": "xla"})})
    together = Two()
    assert not declares(spec, together)
    model, _ = build(spec, load_dataset(spec.data).schema, together)
    assert not has_declared(model)
    assert all(float(each.detach().std()) > 0 for each in tables_of(model).weights.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "self.out = nn.Parameter(torch.from_numpy(np.random.default_rng().normal(size=3).astype('float32')))",
            "makes out with other first values",
        ),
        (
            "self.register_buffer('mean', torch.tensor(random.SystemRandom().random()))",
            "makes mean with other first values",
        ),
        (
            "for name in ['a', 'b'][:: 1 if next(CALLS) % 2 else -1]: setattr(self, name, nn.Linear(1, 1, bias=False))",
            "makes a.weight where the first one makes b.weight",
        ),
        ("if next(CALLS) % 2: self.more = nn.Linear(1, 1)", "makes more.weight where the first one makes flags"),
        (
            "self.wide = nn.Parameter(torch.zeros([(2, 3), (3, 2)][next(CALLS) % 2]))",
            "makes wide with other first values",
        ),
    ],
)
def test_what_processes_make_otherwise_is_named(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(TrainError, match=f"process 1 of the run {said}"):
        build_twice(spec_of(tmp_path, change))


def test_generators_that_a_factory_draws_from_are_seeded_and_left_as_they_were(tmp_path: Path) -> None:
    drawn = "torch.tensor([random.random(), *np.random.rand(2), float(torch.rand(()))])"
    random.seed(5)
    np.random.seed(5)
    spec = spec_of(tmp_path, f"self.out = nn.Parameter({drawn})")
    build_twice(spec)
    after = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    assert after == (random.random(), np.random.rand())
