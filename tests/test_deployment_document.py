"""docs/deployment.md: what its files say fits the engine and one another. The files themselves were tried by hand."""

import configparser
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.cli import OptionParser, config_from, read_config_file
from common.config import EngineConfig, ServerOptions
from common.errors import EXIT_CODES, ConfigError
from frontend.http.endpoints import ENDPOINTS
from frontend.http.middleware import OPEN_PATHS
from frontend.http.streams import KEEP_ALIVE_S
from launcher import serve

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "deployment.md").read_text()
ASKED_BY_PROBES = OPEN_PATHS & {endpoint.path for endpoint in ENDPOINTS}


def blocks(language: str, start: str = "") -> list[str]:
    return [block for block in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if block.startswith(start)]


def options_file() -> str:
    [text] = blocks("yaml", "model:")
    return text


@pytest.fixture
def config(tmp_path) -> EngineConfig:
    """What the document's configuration file amounts to."""
    (tmp_path / "trireme.yaml").write_text(options_file())
    return config_from(OptionParser(prog="launch.py").parse(["--config", str(tmp_path / "trireme.yaml")]))


@pytest.fixture
def unit() -> configparser.SectionProxy:
    [text] = blocks("ini")
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser["Service"]


def dockerfile() -> dict[str, list[str]]:
    """The arguments of every instruction."""
    [text] = blocks("dockerfile")
    found: dict[str, list[str]] = {}
    for line in text.replace("\\\n", "").splitlines():
        instruction, _, arguments = line.partition(" ")
        found.setdefault(instruction, []).append(arguments.strip())
    return found


def pod() -> dict[str, Any]:
    deployment, _service = yaml.safe_load_all(blocks("yaml", "apiVersion")[0])
    return deployment["spec"]["template"]["spec"]


def test_the_configuration_file_is_read(config, tmp_path):
    assert len(read_config_file(tmp_path / "trireme.yaml")) == len(yaml.safe_load(options_file()))
    assert config.model.max_model_len == 8192 and config.log.enable_log_requests


def test_the_unit_fits_the_engine(unit, config):
    words = shlex.split(unit["ExecStart"])
    assert words[:2] == ["/opt/trireme/bin/trireme", "serve"]
    assert serve.parse(words[2:]).config == "/etc/trireme.yaml"
    assert float(unit["TimeoutStopSec"]) > config.server.shutdown_timeout + 10
    assert int(unit["RestartPreventExitStatus"]) == EXIT_CODES[ConfigError]
    check = next(line for line in TEXT.splitlines() if line.startswith("sudo -u trireme env"))
    for folder in re.findall(r"\w+=(/var/cache/\S+)", check):
        assert re.search(rf"={folder}( |$)", blocks("ini")[0], re.MULTILINE), folder


def test_the_container_serves_what_it_is_told():
    [entry] = map(json.loads, dockerfile()["ENTRYPOINT"])
    assert entry[:2] == ["trireme", "serve"]
    [arguments] = re.findall(r"^docker run .* trireme (\S+ --max.*)$", TEXT, re.MULTILINE)
    served = config_from(serve.parse(entry[2:] + shlex.split(arguments)))
    assert (served.server.host, served.model.model, served.model.max_model_len) == ("0.0.0.0", "Qwen/Qwen3-0.6B", 8192)


def test_the_container_installs_what_the_project_needs():
    parts = dockerfile()
    assert {image.split()[0] for image in parts["FROM"]} == {"python:3.12-slim"}, "a version that pyproject.toml allows"
    [(source, folder)] = [copy.split() for copy in parts["COPY"] if copy.startswith("pyproject")]
    [command] = [run for run in parts["RUN"] if "needed.txt" in run]
    code = shlex.split(command.partition("python -c ")[2].partition(" > ")[0])[0]
    assert folder + source in code
    code = code.replace(folder + source, str(ROOT / source))
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert listed.splitlines() == project["dependencies"]


def test_what_the_container_is_asked_for_its_health_is_there():
    [check] = dockerfile()["HEALTHCHECK"]
    [program] = re.findall(r"\[.*\]", check)
    [(port, path)] = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", json.loads(program)[2])
    assert path in ASKED_BY_PROBES
    assert [port] == dockerfile()["EXPOSE"] == [str(ServerOptions().port)]


def test_the_pod_fits_image_and_configuration(config):
    spec = pod()
    [container] = spec["containers"]
    [user] = dockerfile()["USER"]
    assert spec["securityContext"]["runAsNonRoot"] and int(user) == spec["securityContext"]["fsGroup"]
    for probe in (container["startupProbe"], container["readinessProbe"]):
        assert probe["httpGet"]["path"] in ASKED_BY_PROBES
        assert probe["httpGet"]["port"] == container["ports"][0]["name"]
    assert [str(container["ports"][0]["containerPort"])] == dockerfile()["EXPOSE"]
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > pause_s + config.server.shutdown_timeout + 10
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}
    assert mounts["cache"] in dockerfile()["VOLUME"] and mounts["tmp"] == "/tmp"
    assert container["args"] == ["--config", f"{mounts['config']}/trireme.yaml"]


def test_the_proxy_passes_on_what_the_engine_serves():
    server = blocks("nginx")[0]
    [outside] = re.findall(r"location (\S+) \{", server)
    [inside] = re.findall(r"proxy_pass http://trireme(\S+);", server)
    [root] = re.findall(r"and the engine with `--root-path (\S+)`", TEXT)
    assert outside == root + inside
    paths = [endpoint.path for endpoint in ENDPOINTS if endpoint.path.startswith(inside)]
    assert "/v1/chat/completions" in paths and "/abort_request" not in paths
    EngineConfig(server=ServerOptions(root_path=root))
    assert "ssl_certificate " in server and "ssl_certificate_key " in server, "nginx does not start without"
    assert "proxy_read_timeout 1h" in server and KEEP_ALIVE_S < 3600
