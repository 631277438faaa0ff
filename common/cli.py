"""The command line, generated from the option definitions in `common.config`.

Each option's flags, help, choices and parser come from its dataclass field, so there is one definition per option.
`--config FILE` reads the same options from YAML or JSON (`max-model-len: 8k`); what the command line says wins.
Whatever cannot be understood raises `ConfigError` with one line that says what was wanted. Called by `launch.py` and
`LLM`; knows nothing of processes. Loads yaml only when a file is read.
"""

import argparse
import dataclasses
import difflib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_origin

from common.config import GROUPS, EngineConfig, parse_count
from common.errors import ConfigError
from common.other_engines import INSTEAD

Field = dataclasses.Field[Any]

_PREFIX = "option."  # of the namespace's names, so that a program's own arguments cannot collide with options
_PREFIX_CACHE_SWITCHES = {"enable-prefix-caching": True, "disable-radix-cache": False}
"""Other engines' switches for `prefix_cache`, with their values that turn it on."""
MODEL_DESTINATION = _PREFIX + "model.model"
"""The namespace's name of `--model`, for programs that also take the model as an argument."""


class VerbParser(argparse.ArgumentParser):
    """An argument parser that takes whole option names only, and raises ConfigError instead of exiting."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message."""
        raise ConfigError(message)


class OptionParser(VerbParser):
    """An argument parser that knows every configuration option.

    A program adds its own arguments as usual, calls `parse`, and hands the result to `config_from`.

    Args:
        show_options: have `--help` list the options; without it they are taken all the same.
    """

    def __init__(self, *, show_options: bool = True, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.add_argument("--config", metavar="FILE", help="YAML or JSON file with options; the command line wins")
        for group_name, group in GROUPS.items():
            section = self.add_argument_group(group_name, (group.__doc__ or "").strip())
            for item in dataclasses.fields(group):
                _add_option(section, group_name, item)
        _add_vllm_switches(self)
        if not show_options:
            self._action_groups = self._action_groups[:2]  # what --help walks through

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse, with a hint at what to use for an option that does not exist; raises ConfigError."""
        parsed, unknown = self.parse_known_args([_with_dashes(argument) for argument in arguments])
        if unknown:
            raise ConfigError(f"unknown argument {unknown[0]}{_hint(unknown[0], list(self._option_string_actions))}")
        return parsed


def program_name() -> str:
    """What the user typed to get here: `trireme` where it is installed, or `launch.py`."""
    return "trireme" if Path(sys.argv[0]).name == "trireme" else "launch.py"


def is_given(parsed: argparse.Namespace, group_name: str, name: str) -> bool:
    """Whether the command line itself has this option."""
    return f"{_PREFIX}{group_name}.{name}" in vars(parsed)


def config_from(parsed: argparse.Namespace, **top_level: Any) -> EngineConfig:
    """The configuration that parsed arguments (and the file they name) amount to.

    Args:
        parsed: what `OptionParser.parse` returned.
        top_level: further fields of EngineConfig.

    Raises:
        ConfigError: an unreadable file, an unknown key, or values that are refused.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
    if parsed.config:
        for (group, name), value in read_config_file(Path(parsed.config)).items():
            values[group][name] = value
    for key, value in vars(parsed).items():
        if key.startswith(_PREFIX):
            _, group, name = key.split(".")
            values[group][name] = tuple(value) if isinstance(value, list) else value
    groups = {name: group(**values[name]) for name, group in GROUPS.items()}
    return EngineConfig(**groups, **top_level)


def config_from_options(**options: Any) -> EngineConfig:
    """The configuration from keyword arguments named like the options (`max_model_len=4096`); raises ConfigError.

    None leaves an option as it is, as in vLLM.
    """
    given = {name: value for name, value in options.items() if value is not None}
    values: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
    for (group, name), value in _by_field(given, "", "_").items():
        values[group][name] = value
    return EngineConfig(**{name: group(**values[name]) for name, group in GROUPS.items()})


def all_options() -> list[tuple[str, Field]]:
    """Every option as (group name, dataclass field)."""
    return [(group_name, item) for group_name, group in GROUPS.items() for item in dataclasses.fields(group)]


def flags_of(item: Field) -> tuple[str, ...]:
    """An option's names on the command line, the first of them its own."""
    return tuple(item.metadata["flags"]) or ("--" + item.name.replace("_", "-"),)


def to_arguments(config: EngineConfig) -> list[str]:
    """The command line that gives this configuration: only what differs from the defaults."""
    arguments = []
    for group_name, item in all_options():
        value = getattr(getattr(config, group_name), item.name)
        if value == item.default:
            continue
        flag = flags_of(item)[0]
        if item.type is bool:
            arguments.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            arguments += [f"{flag}={entry}" for entry in (value if isinstance(value, tuple) else (value,))]
    return arguments


def read_config_file(path: Path) -> dict[tuple[str, str], Any]:
    """The options in a YAML or JSON file, keyed by (group, field).

    Keys are option names as on the command line, without the dashes in front; `_` may stand for `-`.

    Raises:
        ConfigError: not readable, not a mapping, an unknown key or a value of the wrong kind.
    """
    values, repeated = _load_mapping(path)
    if repeated:
        raise ConfigError(f"--config: {path}: {repeated}; wanted it once")
    return _by_field(values, f"{path}: ", "-")


def log_format_in(path: Path) -> str:
    """The log format that a file asks for, which may be refused for something else; empty if none can be read."""
    try:
        values, _ = _load_mapping(path)
    except ConfigError:
        return ""
    return next((str(value) for key, value in values.items() if _plain(str(key)) == "log-format"), "")


def _by_field(given: Mapping[Any, Any], source: str, hyphen: str) -> dict[tuple[str, str], Any]:
    """Options that are given under any of their names, keyed by (group, field), with their values checked.

    Args:
        given: by name, without the dashes in front.
        source: what errors begin with.
        hyphen: what stands between the words of names that errors propose.
    """
    known = {_plain(flag): (group, item) for group, item in all_options() for flag in flags_of(item)}
    options: dict[tuple[str, str], Any] = {}
    names: dict[tuple[str, str], Any] = {}
    for key, value in given.items():
        name = _plain(str(key))
        if name in _PREFIX_CACHE_SWITCHES:
            is_on = _switch(value, f"{source}{key}") == _PREFIX_CACHE_SWITCHES[name]
            place, checked = ("cache", "prefix_cache"), "hash" if is_on else "off"
        elif name in known:
            group, item = known[name]
            place, checked = (group, item.name), _checked(item, value, f"{source}{key}")
        else:
            hint = _hint(name.replace("-", hyphen), [flag.replace("-", hyphen) for flag in known])
            raise ConfigError(f"{source}unknown option {key!r}{hint}")
        if place in options:
            raise ConfigError(f"{source}{names[place]} and {key} are the same option; wanted one of them")
        options[place], names[place] = checked, key
    return options


def _load_mapping(path: Path) -> tuple[dict[Any, Any], str]:
    """What a file holds, and what `_repeated_key` says of it; raises ConfigError."""
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text())
        node = loader.get_single_node()
        repeated = "" if node is None else _repeated_key(node)
        values = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no such day
        raise ConfigError(f"--config: {path} is neither YAML nor JSON: {_unreadable(error)}") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f"--config: {path} must hold a mapping from option names to values")
    return values or {}, repeated


def _unreadable(error: Exception) -> str:
    """What a reader of YAML objects to, and where, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}"


def _repeated_key(document: Any) -> str:
    """Which key stands twice in one mapping, of which YAML's and JSON's readers take the last; empty if none does.

    Args:
        document: its node, as it is written: nothing is merged into it yet.
    """
    left, seen = [document], set()
    while left:
        node = left.pop()
        if node in seen or node.id == "scalar":
            continue
        seen.add(node)
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value if node.id == "mapping" else ():
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if key.id == "scalar" and name in lines:
                return f"{key.value!r} stands in lines {lines[name]} and {line}"
            if key.id == "scalar":
                lines[name] = line
            left += [key, value]
        left += node.value if node.id == "sequence" else ()
    return ""


def _checked(item: Field, value: Any, where: str) -> Any:
    """A value that did not come from the command line, held to the same rules."""
    if item.metadata["repeat"]:
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_checked_text(item, str(entry), where) for entry in values)
    if item.type is bool:
        return _switch(value, where)
    if isinstance(value, bool):  # YAML reads a bare `off` or `on` as a boolean
        value = "on" if value else "off"
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{where}: wanted one value, got {value!r}")
    return _checked_text(item, str(value), where)


def _switch(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: wanted true or false, got {value!r}")
    return value


def _checked_text(item: Field, text: str, where: str) -> Any:
    if "\0" in text:  # as no argument can, and no path may
        raise ConfigError(f"{where}: wanted a text without null characters, got {text!r}")
    try:
        value = _parser_of(item)(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}") from None
    choices = item.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"{where}: wanted one of {', '.join(choices)}; got {text!r}")
    return value


def _add_option(section: Any, group_name: str, item: Field) -> None:
    metadata = item.metadata
    keywords: dict[str, Any] = {"dest": f"{_PREFIX}{group_name}.{item.name}", "default": argparse.SUPPRESS}
    keywords["help"] = f"{metadata['help']} (default: {_shown_default(item)})"
    flags = flags_of(item)
    if item.type is bool:
        section.add_argument(*flags, action=argparse.BooleanOptionalAction, **keywords)
        return
    keywords["type"] = _parser_of(item)
    if metadata["choices"]:
        keywords["choices"] = metadata["choices"]
    else:
        own = "N" if item.type in (int, float) else item.name.split("_")[-1].upper()
        keywords["metavar"] = metadata["metavar"] or own
    if metadata["repeat"]:
        keywords |= {"action": "extend", "nargs": "+"}
    section.add_argument(*flags, **keywords)


def _add_vllm_switches(parser: argparse.ArgumentParser) -> None:
    """Switches of other engines that are values of one option here."""
    keywords: dict[str, Any] = {"dest": f"{_PREFIX}cache.prefix_cache", "default": argparse.SUPPRESS}
    section = parser.add_argument_group("names from other engines")
    section.add_argument("--enable-prefix-caching", action="store_const", const="hash",
                         help="the same as --prefix-cache hash", **keywords)  # fmt: skip
    section.add_argument("--no-enable-prefix-caching", "--disable-radix-cache", action="store_const", const="off",
                         help="the same as --prefix-cache off", **keywords)  # fmt: skip


def _parser_of(item: Field) -> Callable[[str], Any]:
    if item.metadata["count"]:
        return _count if item.default else _count_or_auto
    if item.type is int:
        return _integer
    if item.type is float:
        default: Any = item.default
        return _number if default >= 0 else partial(_number, automatic=default)
    assert item.type is str or get_origin(item.type) is tuple, f"option {item.name} has no parser for {item.type}"
    synonyms = item.metadata["synonyms"]
    return (lambda text: synonyms.get(text, text)) if synonyms else str


def _count(text: str, hint: str = "") -> int:
    try:
        return parse_count(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error}{hint}") from None


def _count_or_auto(text: str) -> int:
    return 0 if text in ("auto", "-1") else _count(text, "; 'auto' stands for 0")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted a whole number, got {text!r}") from None


def _number(text: str, automatic: float | None = None) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value != automatic and not (math.isfinite(value) and value >= 0):
        also = "" if automatic is None else f", or {automatic:g} for the default"
        raise argparse.ArgumentTypeError(f"wanted a number from 0 up{also}, got {text!r}")
    return value


def _shown_default(item: Field) -> str:
    """An option's default as one would write it."""
    default: Any = item.default
    if item.type is bool:
        return "on" if default else "off"
    if default in ("", ()):
        return "none"
    if item.metadata["count"] and default and default % (1 << 30) == 0:
        return f"{default >> 30}GiB"
    return f"{default:g}" if item.type is float else str(default)


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")


def _with_dashes(argument: str) -> str:
    """`--max_model_len=8` is taken for `--max-model-len=8`, as in vLLM."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _hint(name: str, known: list[str]) -> str:
    """What to do about a name that is no option's."""
    name = name.partition("=")[0]
    if instead := INSTEAD.get(f"--{_plain(name).partition('.')[0]}"):  # vLLM has `--some-config.part` too
        return f"; {instead}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


class _HelpFormatter(argparse.HelpFormatter):
    """Wide enough for our options, and with the line breaks of a description kept."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse.BooleanOptionalAction):
            return super()._format_action_invocation(action)
        return ", ".join(f"--[no-]{flag[2:]}" for flag in action.option_strings if not flag.startswith("--no-"))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "".join(f"{indent}{line}\n" for line in text.splitlines()).rstrip("\n")

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        return super()._format_usage(usage or "%(prog)s [options]", actions, groups, prefix)
