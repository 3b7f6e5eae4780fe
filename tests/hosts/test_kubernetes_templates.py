"""What lies in deploy/kubernetes: manifests of the kinds that they say, of one mind with each other, and that train.

No cluster is needed. Schemas are Kubernetes' own (kubernetes-validate) and, for the JobSet, the models that Kubeflow
makes of JobSet's. A training runs as the Jobs say, on machines of the test: with the commands, variables and names of
the manifests and nothing else in the environment. Left out: pulling an image, volumes, scheduling.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from penstock.configs.loading.load import load_config
from penstock.engines.groups.channel import FLOW_KEYS, HOST_KEYS
from tests.hosts.conftest import TINY
from tests.hosts.machines import ROOT, Machine, network
from tests.waiting import came_true, until

FOLDER = ROOT / "deploy" / "kubernetes"
RELEASE = "1.30"  # of Kubernetes, a few years old
Manifest = dict[str, Any]
MANIFESTS = ["claim.yaml", "jobs/service.yaml", "jobs/flow.yaml", "jobs/hosts.yaml"]


def manifest(name: str) -> Manifest:
    """Return a manifest as it lies there."""
    return dict(yaml.safe_load((FOLDER / name).read_text()))


def pod_of(job: Manifest) -> Manifest:
    return dict(job["spec"]["template"]["spec"])


def jobs_of_jobset() -> dict[str, Manifest]:
    """Return the Jobs that the JobSet makes, by name."""
    jobs = manifest("jobset/jobset.yaml")["spec"]["replicatedJobs"]
    head = {"apiVersion": "batch/v1", "kind": "Job"}
    return {job["name"]: {**head, "metadata": {"name": job["name"]}, **job["template"]} for job in jobs}


def keys() -> list[Manifest]:
    """Return the Secrets of new-keys."""
    with_penstock = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = [str(FOLDER / "new-keys")]
    return list(yaml.safe_load_all(subprocess.check_output(words, env=with_penstock, text=True)))


def refused(document: Manifest) -> str:
    """Return what Kubernetes' schema says against a manifest."""
    try:
        kubernetes_validate.validate(document, RELEASE, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


def test_manifests_are_what_their_kinds_may_be() -> None:
    """No key that Kubernetes does not know, no value of another type. Controls: a key misspelt, a text for a number."""
    for document in [*map(manifest, MANIFESTS), *jobs_of_jobset().values(), *keys()]:
        assert not refused(document), document["metadata"]
    job = manifest("jobs/hosts.yaml")
    assert "completion" in refused({**job, "spec": {**job["spec"], "completion": 2}})
    assert "'two'" in refused({**job, "spec": {**job["spec"], "completions": "two"}})


def test_the_jobset_is_what_a_jobset_may_be() -> None:
    """All that it says is known to JobSet's model and comes back from it. Control: a key misspelt does not."""
    document = manifest("jobset/jobset.yaml")

    def comes_back(document: Manifest) -> bool:
        read = JobsetV1alpha2JobSet.from_dict(document)
        return read is not None and read.to_dict() == document

    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert comes_back(document)
    assert not comes_back({**document, "spec": {**document["spec"], "failPolicy": {}}})


def test_both_variants_say_the_same() -> None:
    """Of pods and Jobs, but for the name by which the training is found, and that it has one there."""
    jobset = jobs_of_jobset()
    for name in ("flow", "hosts"):
        text = yaml.safe_dump(jobset[name]["spec"]).replace("penstock-flow-0-0.penstock", "penstock-flow")
        expected = manifest(f"jobs/{name}.yaml")["spec"]
        named = {"completionMode": "Indexed", "completions": 1, "parallelism": 1} if name == "flow" else {}
        assert yaml.safe_load(text) == expected | named


def test_recipe_and_manifests_agree() -> None:
    """On the number of hosts, the GPUs of each, the port, and the names of what is asked for."""
    tree = yaml.safe_load((FOLDER / "recipe" / "recipe.yaml").read_text())
    assert tree["base"].startswith("/penstock/configs/")
    group, port = tree["groups"]["main"], tree["hosts"]["port"]
    flow, hosts, service = (manifest(f"jobs/{name}.yaml") for name in ("flow", "hosts", "service"))
    assert hosts["spec"]["completions"] == hosts["spec"]["parallelism"] == group["hosts"]
    (host,), (train,) = pod_of(hosts)["containers"], pod_of(flow)["containers"]
    assert host["resources"]["limits"]["nvidia.com/gpu"] == len(group["gpus"])
    assert host["args"] == ["host", f"{service['metadata']['name']}:{port}"]
    assert [item["port"] for item in service["spec"]["ports"]] == [port] == [train["ports"][0]["containerPort"]]
    assert service["spec"]["selector"] == flow["spec"]["template"]["metadata"]["labels"]
    claims = {volume["persistentVolumeClaim"]["claimName"] for volume in _volumes(flow, hosts)}
    assert claims == {manifest("claim.yaml")["metadata"]["name"]}
    asked = {
        item["valueFrom"]["secretKeyRef"]["name"]: item["name"]
        for container in (train, host)
        for item in container["env"]
        if "secretKeyRef" in item.get("valueFrom", {})
    }
    assert asked == {secret["metadata"]["name"]: next(iter(secret["stringData"])) for secret in keys()}


def _volumes(*jobs: Manifest) -> list[Manifest]:
    volumes = [volume for job in jobs for volume in pod_of(job)["volumes"]]
    return [volume for volume in volumes if "persistentVolumeClaim" in volume]


def test_the_recipe_is_one(tmp_path: Path) -> None:
    """It is read with what the manifests add. Its base lies elsewhere here."""
    text = (FOLDER / "recipe" / "recipe.yaml").read_text()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.replace("/penstock/configs", str(ROOT / "configs")))
    config = load_config(recipe, ["hosts.address=10.0.0.7"])
    assert config.groups and config.groups["main"].hosts == 2
    assert config.hosts and config.hosts.address == "10.0.0.7"


def test_pods_have_no_rights_that_they_do_not_need() -> None:
    """Not root, no more rights than they start with, no account, not the network of their node."""
    for job in [*(manifest(f"jobs/{name}.yaml") for name in ("flow", "hosts")), *jobs_of_jobset().values()]:
        pod = pod_of(job)
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl, which brings kustomize")
@pytest.mark.parametrize("variant", ["jobs", "jobset"])
def test_kustomize_makes_a_whole_of_them(variant: str) -> None:
    """With the recipe as a file and the image of the one place where it is named."""
    words = ["kubectl", "kustomize", str(FOLDER / variant)]
    documents = list(yaml.safe_load_all(subprocess.check_output(words, text=True)))
    kinds = {"jobs": ["ConfigMap", "Job", "Job", "Service"], "jobset": ["ConfigMap", "JobSet"]}
    assert sorted(document["kind"] for document in documents) == kinds[variant]
    recipe = next(document["data"] for document in documents if document["kind"] == "ConfigMap")
    assert recipe == {"recipe.yaml": (FOLDER / "recipe" / "recipe.yaml").read_text()}
    images = set(_images(documents))
    assert len(images) == 1 and images != {"penstock"}


def _images(tree: Any) -> Iterator[str]:
    children = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    if isinstance(tree, dict) and isinstance(tree.get("image"), str):
        yield tree["image"]
    for child in children:
        yield from _images(child)


# ---- a training --------------------------------------------------------------------------------------------------


class Pods:
    """Pods on machines of the test, a machine each, which find each other by the names in a file of theirs."""

    def __init__(self, folder: Path, secrets: Mapping[str, str]) -> None:
        self._folder, self._secrets = folder, secrets

    def start(self, machine: Machine, job: Manifest, index: int | None = None) -> subprocess.Popen[bytes]:
        """Start what the containers of a Job's pod run, one after the other; the last is the pod."""
        pod = pod_of(job)
        *before, own = [*pod.get("initContainers", ()), *pod["containers"]]
        for container in before:
            assert self._run(machine, container, index).wait(60) == 0
        return self._run(machine, own, index)

    def log(self, machine: Machine) -> Path:
        """Return where the containers of a machine write."""
        return self._folder / f"{machine.name}.log"

    def _run(self, machine: Machine, container: Manifest, index: int | None) -> subprocess.Popen[bytes]:
        variables = {item["name"]: self._value(item, machine) for item in container.get("env", ())}
        arguments = list(container.get("args", ()))
        for name, value in variables.items():
            arguments = [word.replace(f"$({name})", value) for word in arguments]
        image = {
            **{"PATH": os.environ["PATH"], "HOME": str(self._folder), "USER": "penstock"},
            **{"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1"},
        }
        indexed = {} if index is None else {"JOB_COMPLETION_INDEX": str(index)}
        words = container.get("command", [sys.executable, "-m", "penstock.cli.main"])
        return machine.start([*words, *arguments], image | variables | indexed, self.log(machine), self._folder)

    def _value(self, item: Manifest, machine: Machine) -> str:
        if "value" in item:
            return str(item["value"])
        if "secretKeyRef" in item["valueFrom"]:
            return self._secrets[item["name"]]
        assert item["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        return machine.address


@contextmanager
def named(machines: list[Machine], names: dict[str, str]) -> Iterator[None]:
    """Let these machines know addresses by name, as a cluster's name service does."""
    folders = [Path("/etc/netns", machine.namespace) for machine in machines]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_training_runs_as_the_jobs_say(tmp_path: Path) -> None:
    """Three pods: the training finds its two hosts, ends with exit code 0, and they with it.

    Neither side has the other's keys, and the name is the Service's.
    """
    (tmp_path / "recipe").mkdir()
    group = {"hosts": 2, "ranks": 1, "roles": ["actor", "rollout"]}
    tree = {**TINY, "base": str(ROOT / TINY["base"]), "folder": str(tmp_path / "runs"), "groups": {"main": group}}
    (tmp_path / "recipe" / "recipe.yaml").write_text(yaml.safe_dump({**tree, "hosts": {"port": 5555}}))
    secrets = {name: value for secret in keys() for name, value in secret["stringData"].items()}
    assert set(secrets) == {FLOW_KEYS, HOST_KEYS}
    flow, hosts = manifest("jobs/flow.yaml"), manifest("jobs/hosts.yaml")
    with ExitStack() as stack:
        _, machines = stack.enter_context(network(3))
        stack.enter_context(named(machines, {manifest("jobs/service.yaml")["metadata"]["name"]: machines[0].address}))
        pods = Pods(tmp_path, secrets)
        running = [pods.start(machines[0], flow)]
        running += [pods.start(machine, hosts, index) for index, machine in enumerate(machines[1:])]
        for pod in running:
            stack.callback(pod.kill)
        until(lambda: _ranks(machines) == [0, 1, 1] or running[0].poll() is not None, 120, "the ranks start")
        said = pods.log(machines[0])
        assert running[0].wait(240) == 0, said.read_text()
        assert [host.wait(20) for host in running[1:]] == [0, 0]
        assert came_true(lambda: not any(machine.processes() for machine in machines), 10)
    assert list((tmp_path / "runs").glob("*/models/final/model.safetensors")), said.read_text()


def _ranks(machines: list[Machine]) -> list[int]:
    return [len(machine.processes("penstock.engines.groups.rank")) for machine in machines]
