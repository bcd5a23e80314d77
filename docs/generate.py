"""Write the reference pages from the code they describe: `python docs/generate.py`; with `--check`, only compare.

Reads the job spec's models, the app's OpenAPI document and the table of moves; starts nothing. What code cannot tell
(what an event means) stands here as a table, and a test holds the table to the code.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from twinstep.platform.api import create_app
from twinstep.platform.api.problems import STATUS
from twinstep.platform.scheduler.service import Service
from twinstep.spec import states
from twinstep.spec.errors import TwinstepError
from twinstep.spec.job import DATASETS_OF_ROWS, JobSpec
from twinstep.spec.optimizers import OPTIMIZER_SETTINGS
from twinstep.spec.schema_words import Schema, access_words, answer_words, limit_words, type_words, value_words
from twinstep.spec.states import FINAL, MOVES, RunState

HERE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate.py from the code; change the code, then run it again. -->\n"

RULES = (
    ("model.kind", "`dlrmv3` where it is left out"),
    ("model.source", "null, or a whole path of the image, with `accelerator.kind: tpu` and `gpu`"),
    (
        "data.dataset",
        f"`{'`, `'.join(DATASETS_OF_ROWS)}` with `model.kind: dlrm`, which has the first by default and no other; "
        "`module` takes all",
    ),
    (
        "data.path",
        "required with `dataset: ml-1m`, `ml-20m`, `kuairand-1k`, `streaming`, `parquet`, `criteo`; "
        "other datasets refuse it",
    ),
    ("data.tasks", "each once; one of the dataset's: `docs/howto/bring-your-data.md` lists them"),
    ("data.columns.actions", "each once; at least one where `data.columns.rating` is null"),
    ("data.synthetic.user_features", "none of `user_id`, `segment`, `item_id`"),
    ("data.synthetic.item_features", "none of these, nor of `data.synthetic.user_features`"),
    ("data.features", "each once; one of the dataset's"),
    ("data.uih_budget", "at most `data.uih_len`: no history could fill a larger one"),
    ("data.eval_candidates", "at most `data.num_candidates`; null for datasets of rows"),
    *(
        (f"optimizers.*.{name}", f"another value than the default with `kind: {'`, `'.join(kinds)}` only")
        for name, kinds in OPTIMIZER_SETTINGS.items()
    ),
    ("debug.profile", "`start + steps - 1` is at most `train.steps`"),
    ("accelerator", "`accelerator: cpu` is short for `accelerator: {kind: cpu}`"),
    (
        "accelerator.kind",
        "`tpu` and `gpu` are rendered (`twinstep render`); a control plane refuses to start what it cannot run",
    ),
    ("accelerator.topology", "one that the generation has, its sides in rising order: `twinstep topologies`"),
    ("accelerator.chips_per_host", "to be given where a topology comes with hosts of two sizes: v5e and v6e `2x4`"),
    ("accelerator.slices", "more than one only where a slice has more than one host"),
    ("accelerator.count", "part of a node (1, 2, 4), or whole nodes"),
    (
        "compile.backend",
        "where it is not given, a TPU has `xla` and takes no other; GPUs take `inductor`, `eager`",
    ),
    ("checkpoint.every_steps, every_seconds, keep_best", "need `checkpoint.path` for a run by hand"),
    ("compile.strategies", "each once; null: `sparse_embedding`, `fused_attention`, `fused_update`, `fold_layers`"),
    ("kubernetes.env", "no names that begin with TPU_, MEGASCALE_, TWINSTEP_, JAX_COORDINATOR_, RAY_ or KUBERNETES_"),
    ("kubernetes.topology_aware", "needs `kubernetes.queue`"),
)

EVENTS = (
    ("submitted", "user", "The job was stored.", "`to`"),
    (
        "warned",
        "scheduler",
        "Something speaks against the run, which is let through: what its objects lack, or what preflight found.",
        "`warnings`",
    ),
    ("state_changed", "scheduler, worker", "A run moved from one state to another.", "`from`, `to`"),
    ("restarted", "scheduler", "The cluster started a run's pods again before it had begun.", "`restarts`"),
    ("retried", "user", "A new run was made, which goes on from the last checkpoint.", "`to`, `attempt`, `after`"),
    ("resumed", "user", "A new run was made that goes on from the one before.", "`to`, `attempt`, `after`"),
    ("resized", "user", "A new run of another size was made; the one before stops.", "`to`, `attempt`, `after`"),
    ("suspend_requested", "user", "Somebody asked for the run's nodes to be given back for now.", ""),
    ("resume_requested", "user", "Somebody asked for a suspended run to go on.", ""),
    ("cancel_requested", "user", "Somebody asked for the job to stop.", ""),
    ("started", "worker", "The worker process is up; nothing is loaded yet.", "`versions`, `pid`, `threads`"),
    (
        "rows_left_out",
        "worker",
        "Rows of the dataset broke their format and were left out (data.on_bad_row: skip).",
        "`count`, `kept`, `first`",
    ),
    (
        "features_vary",
        "worker",
        "Rows of one user or item do not agree on a feature (dataset: parquet): the last is taken, and so tells "
        "training what comes later.",
        "`features`",
    ),
    (
        "compiled",
        "worker",
        "The step was compiled for the first time in this run.",
        "`step`, `reason`, `seconds`, `capture_seconds`, `backend`, `cache`, `key`, `nodes`, `sizes`",
    ),
    ("recompiled", "worker", "The step was compiled again; the reason names what changed.", "as for `compiled`"),
    (
        "recompile_storm",
        "worker",
        "The step keeps being compiled; the reason names what keeps changing and what to do.",
        "`step`, `field`, `compiles`, `steps`",
    ),
    (
        "cache_unusable",
        "worker",
        "Compiled programs cannot be kept on disk, or those there not be trusted; the run goes on without.",
        "`step`",
    ),
    (
        "ahead_not_used",
        "worker",
        "No program that preflight compiled for the slice fits the step, or none can be trusted; it is compiled.",
        "`step`, `why`",
    ),
    (
        "limits_changed",
        "worker",
        "Limits of SparseCores' partitions follow what batches asked for; the step is compiled again.",
        "`step`, `stack`, `max_ids`, `max_unique`",
    ),
    (
        "evaluated",
        "worker",
        "Held-out data was scored.",
        "`step`, `seconds`, `auc`, `ne`, `calibration`, `log_loss`",
    ),
    (
        "resumed",
        "worker",
        "The worker goes on from a checkpoint, or its supervisor started it again; the reason says what is done again.",
        "`step`, `lost_steps`, `restart`",
    ),
    ("checkpoint_saved", "worker", "A checkpoint is whole.", "`step`, `bytes`, `seconds`, `name`"),
    (
        "checkpoint_failed",
        "worker",
        "A checkpoint could not be written; the run goes on, and the last good one stays.",
        "`step`, `last_good`",
    ),
    ("checkpoint_lost", "worker", "Another process took the place of the checkpoints.", "`step`, `last_good`"),
    (
        "checkpoints_by_one",
        "worker",
        "Processes do not see one place: process 0 writes all of each checkpoint.",
        "`step`",
    ),
    ("checkpoint_damaged", "worker", "A checkpoint is not whole; an older one is taken.", "`name`"),
    ("steps_lost", "worker", "The last state could not be saved in time before the worker had to go.", "`step`"),
    ("random_state_differs", "worker", "A checkpoint of another backend: dropout goes on with other masks.", "`step`"),
    (
        "batch_skipped",
        "worker",
        "A loss was not finite, or a spike; the batch that spoiled the state is left out (train.on_nan: skip).",
        "`step`, `skipped`",
    ),
    (
        "rolled_back",
        "worker",
        "A loss was not finite, or a spike; the run went back, without the batches since (train.on_nan: rollback).",
        "`step`, `to`, `dropped`",
    ),
    ("graph_saved", "worker", "The captured graph was written to the run's directory (debug.save_graph).", "`file`"),
    ("graph_not_saved", "worker", "It could not be written there; training went on.", ""),
    (
        "profiled",
        "worker",
        "Some steps were traced (debug.profile); what their time went to, in seconds.",
        "`first`, `last`, `time_s`, `directory`, `bytes`",
    ),
    ("profile_failed", "worker", "No trace could be begun or written; training went on.", "`directory`"),
    (
        "loader_workers_unused",
        "worker",
        "The run has several processes, each of which packs its batches in a thread, whatever the spec asks.",
        "`loader_workers`",
    ),
    ("reports_lost", "worker", "Reports found no room on the disk; the run went on without them.", "`count`"),
    ("stopped", "worker", "The worker ended because it was told to (SIGTERM, Ctrl-C).", "`step`"),
    ("failed", "worker", "The worker ended with an error; the reason is the error.", "`code`, `step`"),
    (
        "reports_lost",
        "scheduler",
        "Reports were missing from the spool of a run that had ended.",
        "`first`, `last`",
    ),
)

METRICS = (
    ("loss", "training loss of the step's batch, all tasks together"),
    ("loss/TASK", "the same for one task, where a dataset has several"),
    ("step_ms", "milliseconds from having the batch to having the loss; compiling not counted"),
    ("data_wait_ms", "milliseconds that the loop waited for a batch, mean since the last report"),
    ("batches_ready", "batches that lay ready when the loop asked for one, mean since the last report; 0: it waits"),
    (
        "loader_examples_per_s",
        "training examples per second that the loader's thread or processes would pack if nothing held them up, since "
        "the last report; the step waits for data where this is below examples_per_s",
    ),
    (
        "examples_per_s",
        "training examples (candidates with weight > 0) per second over the last 20 iterations, whole: waiting for "
        "data and reporting counted, compiling and evaluating not",
    ),
    ("tokens_per_s", "history tokens that fill a slot per second, over the same iterations"),
    ("goodput", "useful step time over wall time so far, all attempts of the run together, 0…1"),
    ("chip_hours", "chips, or devices of a CPU, × hours of wall time so far"),
    ("real_tokens", "UIH tokens of the batch that hold an event"),
    ("dummy_tokens", "UIH tokens of the batch that are padding"),
    ("ids_dropped", "ids that limits of SparseCores cost the batch (embedding.overflow: drop)"),
    ("ids_out_of_range", "ids of the batch that named no row, and were dropped or wrapped"),
    ("sample_blocks", "blocks of samples that SparseCores took the batch in; over 1: it was over its limits"),
    ("events_cut", "events left out of the batch because its token budget was full"),
    ("eval/auc", "held-out area under the ROC curve of the first binary task; null where only one class was seen"),
    ("eval/ne", "held-out normalised entropy: log loss over that of always predicting the held-out positive rate"),
    ("eval/calibration", "mean prediction over positive rate, held out"),
    ("eval/log_loss", "held-out log loss"),
    ("eval/mse/TASK", "held-out mean squared error of a regression"),
    (
        "window/auc",
        "the scores of eval/ over the training batches of the last train.window_steps steps, each as it was predicted "
        "before its step: also window/ne, window/calibration, window/log_loss, window/mse/TASK; null where undefined",
    ),
)


def main() -> int:
    """Write the pages, or with --check say which are stale; return the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/reference/ from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is stale")
    check = parser.parse_args().check
    stale = [name for name, page in PAGES.items() if not _is_fresh(HERE / name, page())]
    for name in stale:
        if check:
            print(f"docs/reference/{name} is stale: run python docs/generate.py", file=sys.stderr)
        else:
            HERE.mkdir(exist_ok=True)
            (HERE / name).write_text(PAGES[name]())
            print(f"wrote docs/reference/{name}")
    return 1 if check and stale else 0


def _is_fresh(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


# ---- the job spec ----


def job_spec_page() -> str:
    """Return the page of every field a job spec has."""
    schema = JobSpec.model_json_schema()
    lines = [
        NOTE,
        "# The job spec, field by field",
        "",
        "A job spec is one YAML or JSON document, at most 256 KiB. Only `name` is required. Unknown keys, doubled "
        "keys, YAML aliases and tags are refused. Plain words mean what YAML 1.2's core schema says: `010` is 10, "
        "`on`, `yes` and `1:30` are text; a boolean or a quoted text is no number. `twinstep schema` prints the same "
        "as JSON Schema, `twinstep validate SPEC` checks a file. How to write one: "
        "[write a spec](../howto/write-a-spec.md).",
        "",
        "Between fields:",
        "",
        *(f"- `{field}`: {rule}." for field, rule in RULES),
        "",
    ]
    for path, title, node in _sections(schema, schema, ""):
        lines += [f"## {title}", "", *_described(node), *_field_table(node, schema, path), ""]
    return "\n".join(lines)


def _sections(node: Schema, root: Schema, path: str) -> Iterator[tuple[str, str, Schema]]:
    """Yield path, heading and schema of every object in the spec, in the order of its fields."""
    yield path, f"`{path}`" if path else "The spec", node
    for name, child in node["properties"].items():
        below = f"{path}.{name}" if path else name
        for part in _objects(child, root):
            kinds = part["properties"].get("kind", {})
            if len(_objects(child, root)) > 1:
                yield below, f"`{below}` with `kind: {kinds['const']}`", part
            else:
                yield from _sections(part, root, below)


def _objects(node: Schema, root: Schema) -> list[Schema]:
    """Return the schemas of the objects a field can hold."""
    found = [_resolve(each, root) for each in node.get("oneOf", [node])]
    return [each for each in found if "properties" in each]


def _resolve(node: Schema, root: Schema) -> Schema:
    if "$ref" in node:
        return cast(Schema, root["$defs"][node["$ref"].rpartition("/")[2]])
    return node


def _described(node: Schema) -> list[str]:
    text = node.get("description")
    return [str(text), ""] if text else []


def _field_table(node: Schema, root: Schema, path: str) -> Iterator[str]:
    yield "| field | type | default | limits | meaning |"
    yield "|---|---|---|---|---|"
    required = node.get("required", [])
    # The kind first: what the other fields mean hangs on it.
    for name, field in sorted(node["properties"].items(), key=lambda each: each[0] != "kind"):
        objects = _objects(field, root)
        where = f"{path}.{name}" if path else name
        kind = "mapping, see below" if objects else type_words(field)
        default = (
            "**required**"
            if name in required
            else "its fields' defaults"
            if objects
            else value_words(field.get("default", {}))
        )
        if len(objects) > 1 and name not in required:
            default = {"model": "`dlrmv3`"}.get(name, "`cpu`")
        meaning = field.get("description") or (objects[0].get("description", "") if objects else "")
        yield _row(f"`{where}`", kind, default, limit_words(field), meaning)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") or "–" for cell in cells) + " |"


# ---- the REST API ----


def rest_api_page() -> str:
    """Return the page of every route, its statuses, and what it answers with."""
    document = create_app(cast(Service, None)).openapi()  # routes alone: no service is asked for anything
    operations = [
        (method.upper(), path, each)
        for path, by_method in document["paths"].items()
        for method, each in by_method.items()
    ]
    lines = [
        NOTE,
        "# REST API",
        "",
        "Served by `twinstep up`. `GET /openapi.json` is the whole OpenAPI document, and the page `/docs` shows it. "
        "A user's token, or the cookie "
        "that `POST /v1/session` sets, is asked for off loopback, and on it once there is one "
        "([Share a control plane](../howto/share-a-control-plane.md)); every answer has an `X-Request-Id`. "
        "Bodies and answers are JSON; `POST /v1/jobs` takes YAML too (`application/yaml`). Without a token a request "
        "must come by a name the control plane was told of, and from a page of the control plane's own "
        "where a browser sends it: 403 otherwise.",
        "",
        "| method | path | does |",
        "|---|---|---|",
        *(_row(method, f"[`{path}`](#{_anchor(method, path)})", each["summary"]) for method, path, each in operations),
        "",
    ]
    for method, path, each in operations:
        lines += _operation(method, path, each)
    lines += _problems()
    lines += ["## What answers hold", ""]
    for name in sorted(_answers(operations, document)):
        schema = document["components"]["schemas"][name]
        if "properties" in schema:
            lines += [f"### {name}", "", *_described(schema), "| field | type | meaning |", "|---|---|---|"]
            lines += [
                _row(f"`{key}`", _linked(type_words(field)), _meaning(field))
                for key, field in schema["properties"].items()
            ]
            lines.append("")
        elif "enum" in schema:
            lines += [f"### {name}", "", *_described(schema), f"One of {limit_words(schema)}.", ""]
    return "\n".join(lines)


def _anchor(method: str, path: str) -> str:
    """Return the anchor that GitHub gives the heading of an operation."""
    kept = [each for each in f"{method} {path}".lower() if each.isalnum() or each in " -_"]
    return "".join(kept).replace(" ", "-")


def _operation(method: str, path: str, operation: Schema) -> Iterator[str]:
    yield f"## {method} {path}"
    yield ""
    yield (
        f"{operation['summary']}{'' if operation['summary'].endswith('?') else '.'} {operation['description']}"
        if "description" in operation
        else operation["summary"]
    )
    yield ""
    if body := operation.get("requestBody"):
        kinds = body["content"]
        content = _linked(type_words(next(iter(kinds.values()))["schema"]))
        yield f"Body: {content} as {' or '.join(f'`{kind}`' for kind in kinds)}."
        yield ""
    if told := access_words(operation):
        yield told
        yield ""
    if parameters := operation.get("parameters"):
        yield "| parameter | in | type | default | limits | meaning |"
        yield "|---|---|---|---|---|---|"
        for each in parameters:
            schema = each["schema"]
            default = "required" if each["required"] else value_words(schema["default"]) if "default" in schema else ""
            yield _row(
                f"`{each['name']}`",
                each["in"],
                _linked(type_words(schema)),
                default,
                limit_words(schema),
                each.get("description", ""),
            )
        yield ""
    statuses = []
    for status, answer in operation["responses"].items():
        statuses.append(f"{status} {_linked(answer_words(answer))}")
    yield f"Answers: {'; '.join(_grouped(statuses))}."
    yield ""


def _grouped(statuses: list[str]) -> list[str]:
    """Put statuses with the same answer together."""
    by_answer: dict[str, list[str]] = {}
    for each in statuses:
        status, _, answer = each.partition(" ")
        by_answer.setdefault(answer, []).append(status)
    return [f"{', '.join(found)} {answer}" for answer, found in by_answer.items()]


_IN_SPEC = {"JobSpec": "job-spec.md", "RunState": "states-and-events.md"}


def _linked(kind: str) -> str:
    """Turn the name of a schema into a link to where it is described."""
    out = kind
    for part in kind.split("`")[1::2]:
        out = out.replace(f"`{part}`", f"[{part}]({_IN_SPEC.get(part, '#' + part.lower())})")
    return out


def _meaning(field: Schema) -> str:
    return "; ".join(part for part in (str(field.get("description", "")), limit_words(field)) if part)


def _problems() -> Iterator[str]:
    yield "## Errors"
    yield ""
    yield (
        "Every error is RFC 9457 problem details (`application/problem+json`, see [Problem](#problem)): what is wrong "
        "(`detail`), what to do (`remedy`), and one entry of `faults` per field. `code` is stable."
    )
    yield ""
    yield "| status | code | when |"
    yield "|---|---|---|"
    for kind, status in sorted(STATUS.items(), key=lambda each: (each[1], each[0].code)):
        yield _row(str(status), f"`{kind.code}`", _when(kind))
    yield ""


def _when(kind: type[TwinstepError]) -> str:
    if kind is TwinstepError:
        return "The control plane failed on the request; its log says why."
    return (kind.__doc__ or "").strip().splitlines()[0]


def _answers(operations: list[tuple[str, str, Any]], document: Schema) -> set[str]:
    """Return the names of schemas that answers and report bodies are made of; the job spec has a page of its own."""
    found: set[str] = set()
    schemas = document["components"]["schemas"]

    def walk(node: Any) -> None:
        if isinstance(node, Mapping):
            name = str(node.get("$ref", "")).rpartition("/")[2]
            if name and name not in found and name not in _IN_SPEC:
                found.add(name)
                walk(schemas[name])
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    for _, _, operation in operations:
        walk(operation.get("responses"))
        walk(operation.get("requestBody"))
    return found


# ---- states, events, metrics ----


def states_page() -> str:
    """Return the page of run states, the moves between them, events and metrics."""
    meanings = _member_docs(states, "RunState")
    meanings |= {
        "succeeded": "Its worker finished: exit code 0.",
        "failed": "It ended otherwise, and nobody asked it to; the reason says how.",
        "cancelled": "It ended because somebody asked it to.",
    }
    lines = [
        NOTE,
        "# States, events and metrics",
        "",
        "A job's state is the state of its newest run. Every move is an event with time, actor and reason, written in "
        "one transaction with the move; a move that is not in this table is refused. Local runs are never `restarting` "
        "and never go back to `queued`: those moves are for clusters.",
        "",
        "| state | meaning | may become |",
        "|---|---|---|",
    ]
    for state in RunState:
        after = (
            ", ".join(f"`{to}`" for to in RunState if to in MOVES[state]) if state not in FINAL else "nothing: final"
        )
        lines.append(_row(f"`{state}`", meanings[state.value], after))
    lines += ["", "## Events", "", "| name | actor | meaning | data |", "|---|---|---|---|"]
    lines += [_row(f"`{name}`", actor, meaning, data) for name, actor, meaning, data in EVENTS]
    lines += [
        "",
        "## Metrics",
        "",
        "Training metrics come every `train.log_every` steps, and at the first and last step; `eval/…` with each "
        "evaluation. Scores of a dataset's second and later binary tasks have the task's name at the end: "
        "`eval/auc/TASK`. What is undefined or not finite is null.",
        "",
        "| name | meaning |",
        "|---|---|",
        *(_row(f"`{name}`", meaning) for name, meaning in METRICS),
        "",
    ]
    return "\n".join(lines)


def _member_docs(module: ModuleType, class_name: str) -> dict[str, str]:
    """Return the text under each member of an enum, by the member's value."""
    tree = ast.parse(inspect.getsource(module))
    body = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == class_name).body
    found = {}
    for member, text in itertools.pairwise(body):
        if isinstance(member, ast.Assign) and isinstance(text, ast.Expr):
            found[ast.literal_eval(member.value)] = " ".join(ast.literal_eval(text.value).split())
    return found


PAGES: dict[str, Callable[[], str]] = {
    "job-spec.md": job_spec_page,
    "rest-api.md": rest_api_page,
    "states-and-events.md": states_page,
}

if __name__ == "__main__":
    sys.exit(main())
