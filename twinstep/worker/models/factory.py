"""The factory of a user's nn.Module: found by its name, from the folder that the spec gives, with errors that help.

To import a user's code is to run it. `module.py` does so where a model is built: in a run's worker, and in the commands
`parity`, `explain`, `tables`, `preflight --aot`, `compile`, `export` and `score`, as whoever calls them. The control
plane never does.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from twinstep.spec.errors import SpecError, ToldToStop
from twinstep.spec.module import ModuleSpec


def find_factory(model: ModuleSpec) -> Callable[..., Any]:
    """Import a factory's module, from `source` where one is given, and return the factory.

    Raises:
        SpecError: there is no such folder, module or name, importing it fails, or it cannot be called.
    """
    path, _, name = model.factory.partition(":")
    folder = None if model.source is None else Path(model.source).expanduser().absolute()
    module = _imported(path, folder)
    found = getattr(module, name, None)
    if found is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise SpecError(
            f"model.factory names {name!r}, which {path} ({module.__file__}) does not have",
            remedy=f"factory: {path}:{close[0]}" if close else f"define a function {name}(config) there",
        )
    if not callable(found):
        raise SpecError(
            f"model.factory {model.factory} is {kind_of(found)}, which cannot be called",
            remedy="name a function or class that is called with a twinstep.ModuleConfig and returns an nn.Module",
        )
    factory: Callable[..., Any] = found
    return factory


def _imported(path: str, folder: Path | None) -> ModuleType:
    top = path.partition(".")[0]
    if folder is not None:
        _check_folder(folder, top)
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # last: a file there must not stand in for one of Python's own modules
            importlib.invalidate_caches()
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise SpecError(
                f"{path} needs the module {error.name!r}, which is not installed{place_of(error)}",
                remedy="install it where the worker runs (on a cluster: in the image), or leave out its import",
            ) from error
        raise SpecError(
            f"model.factory names the module {path!r}, and there is no {error.name!r}",
            remedy=_where(error.name, folder),
        ) from None
    except ToldToStop:
        raise
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"{path} fails when it is imported{place_of(error)}: {said_of(error)}", remedy="mend it"
        ) from error
    _check_origin(module, folder)
    return module


def _check_folder(folder: Path, top: str) -> None:
    if not folder.is_dir():
        raise SpecError(
            f"model.source {folder} is no folder here",
            remedy=f"source: the folder that {top} lies in; a relative one leads from where twinstep is called",
        )
    if not (folder / top).is_dir() and not (folder / f"{top}.py").is_file():
        names = [each.stem for each in folder.iterdir() if each.suffix == ".py" or (each / "__init__.py").is_file()]
        close = difflib.get_close_matches(top, names, n=1)
        raise SpecError(
            f"model.source {folder} holds no {top} and no {top}.py",
            remedy=f"did you mean {close[0]}?" if close else f"source: the folder that {top} lies in",
        )


def _where(name: str, folder: Path | None) -> str:
    here = Path.cwd()
    if folder is None and ((here / name).is_dir() or (here / f"{name}.py").is_file()):
        return f"source: {here}"
    wanted = f"source: the folder that {name} lies in, or install it where the worker runs"
    return wanted if "." not in name else f"see that {name.rpartition('.')[0]} has it"


def _check_origin(module: ModuleType, folder: Path | None) -> None:
    """Refuse a module of the same name from elsewhere: another code than the user's would be trained."""
    origin = getattr(module, "__file__", None)
    if folder is None or origin is None or Path(origin).is_relative_to(folder):
        return  # by its name, since a package in the folder may be a link to elsewhere
    if Path(origin).resolve().is_relative_to(folder.resolve()):
        return
    top = module.__name__.partition(".")[0]
    raise SpecError(
        f"{module.__name__} is {origin}, which Python finds before model.source {folder}",
        remedy=f"give {top} a name of its own, or remove the other one",
    )


def check_arguments(factory: Callable[..., Any], model: ModuleSpec, config: Any) -> None:
    """Raise SpecError unless a factory takes a config and the spec's arguments."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # what is written in C may have none
        return
    try:
        signature.bind(config, **model.arguments)
    except TypeError as error:
        raise SpecError(
            f"model.factory {model.factory} takes {signature}, and is called with a config and model.arguments "
            f"{{{', '.join(model.arguments)}}}: {error}",
            remedy="set model.arguments to its keyword arguments",
        ) from None


_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")
_PYTHONS = sysconfig.get_path("stdlib")


def place_of(error: BaseException) -> str:
    """Return ` at FILE:LINE` of the innermost line that is the user's; nothing where there is none."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_users(each.filename)]
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    return f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def said_of(error: BaseException) -> str:
    """Return an error's kind and first line."""
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def kind_of(value: Any) -> str:
    """Return what kind of thing a value is, with its article."""
    return "nothing" if value is None else f"a {type(value).__name__}"


def _is_users(file: str) -> bool:
    return not file.startswith(_NOT_USERS) and not (file.startswith(_PYTHONS) and "-packages" not in file)
