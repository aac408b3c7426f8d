# The network, the control plane, a small node group for operators, and the roles of Karpenter and the drivers. The machines
# of models are Karpenter's: ../../overlays/eks/nodepools.yaml.

locals {
  name  = "torchrelay" # also in nodepools.yaml: the tag karpenter.sh/discovery, and the role torchrelay-node
  zones = slice(data.aws_availability_zones.available.names, 0, 3)
}

data "aws_caller_identity" "current" {}

data "aws_availability_zones" "available" {
  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

module "vpc" {
  source  = "terraform-aws-modules/vpc/aws"
  version = "~> 6.6"

  name             = local.name
  cidr             = "10.0.0.0/16"
  azs              = local.zones
  private_subnets  = [for index in range(3) : cidrsubnet("10.0.0.0/16", 4, index)]
  public_subnets   = [for index in range(3) : cidrsubnet("10.0.0.0/16", 8, 48 + index)]
  database_subnets = [for index in range(3) : cidrsubnet("10.0.0.0/16", 8, 52 + index)]

  enable_nat_gateway = true
  single_nat_gateway = true # one zone's failure cuts the others off from the internet; false costs three gateways

  public_subnet_tags = { "kubernetes.io/role/elb" = 1 }
  private_subnet_tags = {
    "kubernetes.io/role/internal-elb" = 1
    "karpenter.sh/discovery"          = local.name
  }
}

module "eks" {
  source  = "terraform-aws-modules/eks/aws"
  version = "~> 21.19"

  name               = local.name
  kubernetes_version = var.kubernetes_version

  vpc_id     = module.vpc.vpc_id
  subnet_ids = module.vpc.private_subnets

  endpoint_public_access                   = length(var.api_cidrs) > 0
  endpoint_public_access_cidrs             = var.api_cidrs
  enable_cluster_creator_admin_permissions = true

  addons = {
    coredns                = {}
    kube-proxy             = {}
    eks-pod-identity-agent = { before_compute = true }
    vpc-cni = {
      before_compute       = true
      configuration_values = jsonencode({ enableNetworkPolicy = "true" })
    }
    aws-ebs-csi-driver = {} # the volume of Redis
    aws-efs-csi-driver = {} # the volume of the head
  }

  eks_managed_node_groups = {
    system = {
      instance_types = ["m7i.large"]
      min_size       = 2
      max_size       = 3
      desired_size   = 2
    }
  }

  node_security_group_tags = { "karpenter.sh/discovery" = local.name }
}

module "karpenter" {
  source  = "terraform-aws-modules/eks/aws//modules/karpenter"
  version = "~> 21.19"

  cluster_name                  = module.eks.cluster_name
  node_iam_role_name            = "torchrelay-node"
  node_iam_role_use_name_prefix = false
}

module "ebs_role" {
  source  = "terraform-aws-modules/eks-pod-identity/aws"
  version = "~> 2.8"

  name                      = "${local.name}-ebs"
  attach_aws_ebs_csi_policy = true
  associations = {
    driver = { cluster_name = module.eks.cluster_name, namespace = "kube-system", service_account = "ebs-csi-controller-sa" }
  }
}

module "efs_role" {
  source  = "terraform-aws-modules/eks-pod-identity/aws"
  version = "~> 2.8"

  name                      = "${local.name}-efs"
  attach_aws_efs_csi_policy = true
  associations = {
    driver = { cluster_name = module.eks.cluster_name, namespace = "kube-system", service_account = "efs-csi-controller-sa" }
  }
}

module "load_balancer_role" {
  source  = "terraform-aws-modules/eks-pod-identity/aws"
  version = "~> 2.8"

  name                            = "${local.name}-load-balancer"
  attach_aws_lb_controller_policy = true
  associations = {
    controller = { cluster_name = module.eks.cluster_name, namespace = "kube-system", service_account = "aws-load-balancer-controller" }
  }
}
