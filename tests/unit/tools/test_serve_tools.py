"""The tools of the server: what they refuse, and a prompt loop against a real one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from problems import problem
from scripts import module_of
from servers import serving

from megatron.common.errors import DataError, MegatronError, WrongCheckpointError
from megatron.config.inference.generation import GenerationConfig
from megatron.config.inference.server import ServingConfig, serving_problems
from megatron.inference.loading.model_source import read_model_source
from megatron.inference.server.server import listener

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture(scope="module")
def server_tool():
    return module_of(TOOLS / "run_text_generation_server.py")


def test_the_benchmark_prints_a_line_for_each_number_of_clients(group, capsys):
    tool = module_of(TOOLS.parent / "benchmarks" / "serve.py")
    sizes = "--layers 1 --hidden 8 --heads 2 --vocab 99 --prompt 3 --new 2 --requests 1"
    tool.main([*sizes.split(), "--clients", "1", "3", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" | ")[0] for line in lines] == ["clients: 1", "clients: 3"]


@pytest.fixture(scope="module")
def client_tool():
    return module_of(TOOLS / "text_generation_cli.py")


def test_every_mistake_is_reported_at_once():
    options = ServingConfig(
        port=70000,
        api_key="",
        api_key_file="key",
        max_prompts=0,
        shutdown_grace=-1,
        request_timeout=0,
    )
    generation = GenerationConfig(prompt="a", beam_width=2, out_seq_length=0)
    found = "\n".join(serving_problems(options, generation))
    for reported in (
        "--port 70000 must be from 0 to 65535",
        "--api-key or --api-key-file, not both",
        "--api-key is empty",
        "--max-prompts 0 must be at least 1",
        "--out-seq-length 0 must be at least 1",
        "--shutdown-grace -1 must be at least 0",
        "--request-timeout 0 must be a number of seconds above 0",
        "--prompt, --beam-width",
    ):
        assert reported in found
    assert [*serving_problems(ServingConfig(), GenerationConfig())] == []


def let_ask(server_tool, monkeypatch, **serving):
    own = {"generation": GenerationConfig(), "serving": ServingConfig(**serving)}
    source = SimpleNamespace(own=own)
    monkeypatch.setattr(server_tool, "read_model_source", lambda *args, **kwargs: source)


def test_a_taken_port_is_reported_before_the_model_is_opened(server_tool, monkeypatch):
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        let_ask(server_tool, monkeypatch, port=port)
        with problem(f"--port {port} … another --port"):
            server_tool.main([])


@pytest.mark.parametrize(
    ("serving", "warns"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key": "sesame"}, False),
        ({"host": "127.0.0.1"}, False),
    ],
)
def test_all_addresses_without_a_key_are_warned_of(
    server_tool, monkeypatch, caplog, serving, warns
):
    with listener(serving["host"], 0) as taken:
        port = taken.getsockname()[1]
        let_ask(server_tool, monkeypatch, port=port, **serving)
        with problem(f"--port {port} … another --port"):
            server_tool.main([])
    assert ("--host 0.0.0.0 without an API key" in caplog.text) is warns
    assert ("set --api-key-file" in caplog.text) is warns


def test_missing_packages_are_reported(server_tool, monkeypatch, modules):
    let_ask(server_tool, monkeypatch)
    for package in ("fastapi", "prometheus_client"):
        modules(package)
    with problem("fastapi, prometheus_client … pip install"):
        server_tool.main([])


def test_the_key_is_read_from_its_file(server_tool, tmp_path):
    file = tmp_path / "key"
    options = ServingConfig(api_key_file=str(file))
    with problem("--api-key-file … No such file", DataError):
        server_tool.read_api_key(options)
    file.write_text("\n")
    with problem("--api-key-file … empty", DataError):
        server_tool.read_api_key(options)
    file.write_text("sesame\n")
    assert server_tool.read_api_key(options) == "sesame"
    assert server_tool.read_api_key(ServingConfig(api_key="x")) == "x"


def test_what_is_typed_is_continued(group, client_tool, tmp_path, stdin, capsys):
    key = tmp_path / "key"
    key.write_text("sésame €\n", encoding="utf-8")
    with serving(group, api_key="sésame €") as running:
        address = f"127.0.0.1:{running.port}"
        stdin("The cat\n5\n\n1\nThe\nmany\nThe\n999\n")
        client_tool.main([address, "--api-key-file", str(key)])
        reported = capsys.readouterr().out
        assert "Megatron Response:\nThe cat" in reported and "Megatron Response:\n<eod>" in reported
        assert "'many' is not a number of tokens" in reported
        assert "Error 400: 999 new tokens are more than 48" in reported
        stdin("a\n1\n")
        client_tool.main([address])
        assert "Error 401: this server needs" in capsys.readouterr().out
    for wrong in (address, "127.0.0.1:port", "[", f"http://{address}"):
        stdin("a\n1\n")
        with problem("no answer from http", MegatronError):
            client_tool.main([wrong])
        assert capsys.readouterr().out == "", "no prompt is printed"
    with problem("--api-key-file … No such file", DataError):
        client_tool.main([address, "--api-key-file", str(tmp_path / "none")])


def test_the_model_may_be_named_in_a_file_of_flags(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text(f"load: {tmp_path}/none\n")
    with problem(f"{tmp_path}/none", WrongCheckpointError):
        read_model_source(["--config", str(file)], {}, description=None)
