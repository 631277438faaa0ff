"""Options of the engine's on the command lines of benchmarks."""

import pytest

from benchmarks import startup, throughput


@pytest.mark.parametrize("text", ["run_ahead", "=1", ""])
@pytest.mark.parametrize("main", [throughput.main, startup.main])
def test_an_option_without_name_or_value_is_refused_before_an_engine_starts(main, text, monkeypatch, capsys):
    """`benchmarks.startup` ended in a traceback."""
    monkeypatch.setattr(throughput, "ENGINES", {})
    monkeypatch.setattr(startup, "measure", pytest.fail)
    with pytest.raises(SystemExit) as caught:
        main(["--output", "", "--option", text])
    assert caught.value.code == 2
    assert f"argument --option: wanted NAME=VALUE, got {text!r}" in capsys.readouterr().err


GIVEN = [f"--option={text}" for text in ("run_ahead=0", "enforce_eager=true", "http=false", "api_key=a=b", "model_x=")]
WANTED = {"run_ahead": "0", "enforce_eager": True, "http": False, "api_key": "a=b", "model_x": ""}


def test_options_reach_the_engine_as_it_takes_them(monkeypatch, capsys):
    """Switches reached only one of them as what they are, and those that are off none."""
    measured = []
    monkeypatch.setattr(startup, "measure", lambda _, options: measured.append(options) or {})
    startup.main([*GIVEN, "--output", ""])
    assert measured == [{"load_format": "auto", "kv_cache_dtype": "auto"} | WANTED]
    assert throughput.engine_options(throughput.parser("").parse_args(GIVEN)) == WANTED
