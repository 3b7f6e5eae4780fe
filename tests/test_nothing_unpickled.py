"""Nothing is unpickled that the run did not write, and no text is executed: in pickle, to read is to run.

Weights are safetensors, records JSON, YAML, Parquet and Arrow, messages msgpack; a model's own code is loaded where a
recipe trusts it (penstock/base/model_code.py).
What may unpickle all the same stands in EXCEPTIONS, and why. Left out: what libraries do by themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.sources import found_in

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing", "pebble"}
CALLS = {"eval", "exec", "torch.load"}
METHODS = {"read_pickle", "recv", "recv_pyobj", "unsafe_load", "full_load"}
COLLECTIVES = {"all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list"}
EXCEPTIONS = {
    "penstock/usercode/kept.py: multiprocessing": "worker processes of the user's own code, in no sandbox",
    "penstock/usercode/workers.py: pebble": "likewise; with a sandbox its worker runs none of that code",
    "penstock/usercode/sandboxed.py: multiprocessing": "what goes into a sandbox is pickled, what comes out is JSON",
    "penstock/usercode/sandboxed.py: recv": "within the sandbox, from the worker that has made it",
    "penstock/environments/openenv_servers.py: recv": "of websockets: text, which is read as JSON",
    "penstock/engines/groups/rank.py: recv": "ZeroMQ's: bytes, of which none are read",
    "penstock/engines/models/loading.py: trust_remote_code": "files of `model.code` alone, as the next three",
    "penstock/engines/models/model_folder.py: trust_remote_code": "for an export",
    "penstock/engines/rollout/engine.py: trust_remote_code": "in vLLM",
    "penstock/data/tokenizer.py: trust_remote_code": "a tokenizer's",
}


def findings(name: str, source: str) -> Iterator[str]:
    """Return what in a module could run what it reads, each as `file: what`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        else:
            imported = []
        yield from (f"{name}: {top}" for top in {module.partition(".")[0] for module in imported} & MODULES)
        if isinstance(node, ast.Call):
            yield from (f"{name}: {what}" for what in _unsafe(node))


def _unsafe(call: ast.Call) -> Iterator[str]:
    spelled = ast.unparse(call.func)
    last = spelled.rpartition(".")[2]
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if spelled in CALLS or last in METHODS | COLLECTIVES:
        yield spelled if spelled in CALLS else last
    if spelled == "yaml.load" and arguments.get("Loader") not in {"yaml.SafeLoader", "RecipeLoader"}:
        yield spelled
    for name in ("allow_pickle", "trust_remote_code"):
        if arguments.get(name, "False") != "False":
            yield name
    if last == "from_pretrained" and spelled.startswith("Auto") and "trust_remote_code" not in arguments:
        yield "from_pretrained without trust_remote_code=False"


def test_what_is_read_runs_nothing_but_where_it_says_why() -> None:
    """An exception that is not needed any more has to go as well."""
    assert found_in(("penstock", "benchmarks"), findings) == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from multiprocessing import connection",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "pd.read_pickle(path)",
        "eval(text)",
        "wire.recv()",
        "distributed.all_gather_object(found, mine)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path)",
    ],
)
def test_it_would_be_found(line: str) -> None:
    """The control, with what is read without running it beside."""
    harmless = "np.load(path); yaml.load(text, Loader=RecipeLoader); json.loads(text); model.eval(); re.compile(text)"
    assert not [*findings("file", harmless)]
    assert [*findings("file", line)]
