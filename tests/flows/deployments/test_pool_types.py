"""Work pools of each type hold what a host needs, as Prefect's server takes it and its workers would start it."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.utilities.templating import apply_values
from prefect.variables import Variable

from penstock.base.errors import UserError
from penstock.cli.prefect.pool_type import PoolType
from penstock.cli.prefect.pools import check_sizes, deploy_pool, template_of
from penstock.session.machines.pools import machines_variable

pytestmark = pytest.mark.usefixtures("prefect_harness")


def started(template: dict[str, Any], **given: Any) -> Any:
    """Return the job that a worker would start: the pool's defaults, under what a run says."""
    properties = template["variables"]["properties"]
    defaults = {name: item["default"] for name, item in properties.items() if item.get("default") is not None}
    return apply_values(
        template["job_configuration"], {**defaults, "env": {}, "command": "prefect flow-run execute"} | given
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PoolType))
def test_a_pool_of_each_type_is_deployed_and_again_changes_nothing(kind: PoolType) -> None:
    """Pool, slots, what the machines have, and the deployment of hosts, whose code is where the workers find it."""
    name = f"pool-{kind.value}"
    rows = deploy_pool(name, 2, 4, kind)
    assert ("concurrency limit", f"gpus-{name}", "8 slots") in rows
    with get_client(sync_client=True) as client:
        pool, deployment = client.read_work_pool(name), client.read_deployment_by_name(f"engine-host/{name}")
        assert pool.type == kind.value
        assert client.read_global_concurrency_limit_by_name(f"gpus-{name}").limit == 8
        (place,) = deployment.pull_steps or []
        folder = place["prefect.deployments.steps.set_working_directory"]["directory"]
        assert (folder == "/penstock") == (kind != PoolType.process)
        assert deploy_pool(name, 2, 4, kind) == rows
        assert client.read_work_pool(name).base_job_template == pool.base_job_template
    assert Variable.get(machines_variable(name)) == {"hosts": 2, "gpus": 4}
    other = PoolType.docker if kind == PoolType.process else PoolType.process
    with pytest.raises(UserError, match=f"is of type '{kind.value}'"):
        deploy_pool(name, 2, 4, other)


def test_a_container_has_the_gpus_the_shared_folder_and_the_host_s_network() -> None:
    """Control: a pool of machines without GPUs asks for none."""
    template = template_of(PoolType.docker, 8)
    assert template is not None
    job = started(template)
    assert (job["network_mode"], job["volumes"]) == ("host", ["/shared:/shared"])
    assert job["container_create_kwargs"]["device_requests"] == [
        {"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}
    ]
    assert job["container_create_kwargs"]["init"], "PID 1 reaps ranks"
    bare = template_of(PoolType.docker, 0)
    assert bare is not None
    assert "device_requests" not in started(bare)["container_create_kwargs"]


def test_a_pod_has_the_gpus_the_shared_folder_and_a_node_of_its_own() -> None:
    """As a Job of Kubernetes, with nothing left to fill in."""
    template = template_of(PoolType.kubernetes, 8)
    assert template is not None
    job = started(template, name="h200-0", namespace="default")["job_manifest"]
    assert "{{" not in str(job)
    assert (job["apiVersion"], job["kind"], job["spec"]["parallelism"]) == ("batch/v1", "Job", 1)
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/shared", "/dev/shm"]
    (rule,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_what_is_said_of_machines_needs_their_number() -> None:
    """Control: with it, both are taken."""
    for gpus, kind in ((4, PoolType.process), (None, PoolType.docker)):
        with pytest.raises(UserError, match="--hosts N"):
            check_sizes(None, gpus, kind)
        check_sizes(2, gpus, kind)
    with pytest.raises(UserError, match="--runs is about the deployments of flows"):
        check_sizes(2, None, PoolType.process, 3)
    check_sizes(None, None, PoolType.process, 3)
