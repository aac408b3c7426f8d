"""The cluster that Terraform and eksctl create is the one that the EKS overlay expects."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.support.kustomize import CLUSTER
from tests.support.requirements import needs_program

TERRAFORM = CLUSTER / "terraform/eks"
FILES = {path.name: path.read_text() for path in TERRAFORM.glob("*.tf")}
SOURCE = re.sub(r"(?m)#.*$", "", "\n".join(FILES.values()))
EKSCTL = yaml.safe_load((CLUSTER / "eksctl.yaml").read_text())
NODE_CLASS, *NODE_POOLS = yaml.safe_load_all((CLUSTER / "overlays/eks/nodepools.yaml").read_text())
ACCOUNTS = {
    each["metadata"]["name"] for each in yaml.safe_load_all((CLUSTER / "base/identity.yaml").read_text())
}
BUCKET = "torchrelay-models-"


@pytest.mark.integration
@needs_program("terraform")
def test_terraform_parses_the_files_and_finds_them_formatted() -> None:
    command = ["terraform", "fmt", "-check", "-diff", str(TERRAFORM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_reference_of_terraform_is_declared() -> None:
    declared = {f"var.{name}" for name in re.findall(r'(?m)^variable "(\w+)"', SOURCE)}
    declared |= {f"module.{name}" for name in re.findall(r'(?m)^module "(\w+)"', SOURCE)}
    declared |= {f"{kind}.{name}" for kind, name in re.findall(r'(?m)^resource "(\w+)" "(\w+)"', SOURCE)}
    declared |= {f"data.{kind}.{name}" for kind, name in re.findall(r'(?m)^data "(\w+)" "(\w+)"', SOURCE)}
    (local,) = re.findall(r"(?ms)^locals \{(.*?)^\}", SOURCE)
    declared |= {f"local.{name}" for name in re.findall(r"(?m)^  (\w+)\s+=", local)}
    pattern = r"(?<![\w.\"/])(?:(?:var|local|module)\.\w+|data\.\w+\.\w+|aws_\w+\.\w+)"
    used = set(re.findall(pattern, SOURCE))
    assert used <= declared
    assert {each for each in declared if not each.startswith(("module.", "aws_"))} <= used, "unused"


def test_every_module_and_provider_has_a_version() -> None:
    modules = re.findall(r'(?ms)^module "\w+" \{(.*?)^\}', SOURCE)
    assert modules and all(re.search(r'version\s+= "~> \d+\.\d+"', body) for body in modules)
    assert re.search(r'version = "~> 6\.\d+"', FILES["versions.tf"])


def names(expression: str) -> set[str]:
    return set(re.findall(expression, SOURCE))


def test_machines_find_their_role_subnets_and_security_group() -> None:
    spec = NODE_CLASS["spec"]
    assert names(r'node_iam_role_name\s+= "(.+)"') == {spec["role"]}
    assert 'name  = "torchrelay"' in SOURCE
    assert len(re.findall(r'"karpenter\.sh/discovery"\s+= local\.name', SOURCE)) == 2
    for terms in (spec["subnetSelectorTerms"], spec["securityGroupSelectorTerms"]):
        assert terms == [{"tags": {"karpenter.sh/discovery": "torchrelay"}}]
    assert EKSCTL["metadata"]["tags"] == {"karpenter.sh/discovery": EKSCTL["metadata"]["name"]}


@pytest.mark.parametrize("pool", NODE_POOLS, ids=lambda pool: pool["metadata"]["name"])
def test_machines_are_replaced_only_when_empty_or_expired(pool: dict[str, Any]) -> None:
    template = pool["spec"]["template"]["spec"]
    assert template["nodeClassRef"]["name"] == NODE_CLASS["metadata"]["name"]
    assert pool["spec"]["disruption"]["consolidationPolicy"] == "WhenEmpty"
    assert (template["expireAfter"], template["terminationGracePeriod"]) == ("336h", "1h")
    is_gpu = "gpu" in pool["metadata"]["name"]
    assert [taint["key"] for taint in template.get("taints", [])] == (["nvidia.com/gpu"] if is_gpu else [])


def test_the_pods_service_accounts_read_the_bucket() -> None:
    models = re.search(r'(?ms)^module "model_role" \{(.*?)^\}', SOURCE)
    assert models and set(re.findall(r'service_account = "(.+?)"', models[1])) == ACCOUNTS
    assert names(r'bucket = "(.+?)\$') == {BUCKET}
    by_account = {
        each["serviceAccountName"]: str(each.get("permissionPolicy"))
        for each in EKSCTL["iam"]["podIdentityAssociations"]
        if each["namespace"] == "torchrelay"
    }
    assert by_account.keys() == ACCOUNTS
    assert all(f"arn:aws:s3:::{BUCKET}" in policy for policy in by_account.values())


def test_both_install_the_same_addons() -> None:
    block = re.search(r"(?ms)^  addons = \{(.*?)^  \}", SOURCE)
    assert block
    added = set(re.findall(r"(?m)^    ([\w-]+)\s+= \{", block[1]))
    assert added == {each["name"] for each in EKSCTL["addons"]}
    assert "enableNetworkPolicy" in block[1] and "enableNetworkPolicy" in str(EKSCTL["addons"])
    assert EKSCTL["metadata"]["version"] in FILES["variables.tf"]
