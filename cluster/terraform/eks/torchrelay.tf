# What the server uses: its image, the model bucket and the role that reads it, the head's volume, the registry's database.

resource "aws_ecr_repository" "torchrelay" {
  name                 = local.name
  image_tag_mutability = "IMMUTABLE"
}

# The prefix is that of store.allowed_urls in ../../base/rayservice.yaml.
resource "aws_s3_bucket" "models" {
  bucket = "torchrelay-models-${data.aws_caller_identity.current.account_id}-${var.region}"
}

resource "aws_s3_bucket_public_access_block" "models" {
  bucket                  = aws_s3_bucket.models.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "models" {
  bucket = aws_s3_bucket.models.id

  versioning_configuration {
    status = "Enabled"
  }
}

# EKS Pod Identity: the service accounts of ../../base/identity.yaml read this bucket and nothing else.
module "model_role" {
  source  = "terraform-aws-modules/eks-pod-identity/aws"
  version = "~> 2.8"

  name                 = "${local.name}-models"
  attach_custom_policy = true
  policy_statements = [
    { actions = ["s3:ListBucket"], resources = [aws_s3_bucket.models.arn] },
    { actions = ["s3:GetObject"], resources = ["${aws_s3_bucket.models.arn}/*"] },
  ]
  association_defaults = { cluster_name = module.eks.cluster_name, namespace = "torchrelay" }
  associations = {
    head   = { service_account = "torchrelay-head" }
    worker = { service_account = "torchrelay-worker" }
  }
}

resource "aws_security_group" "storage" {
  name   = "${local.name}-storage"
  vpc_id = module.vpc.vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "storage" {
  for_each = { nfs = 2049, postgresql = 5432 }

  description                  = each.key
  security_group_id            = aws_security_group.storage.id
  referenced_security_group_id = module.eks.node_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = each.value
  to_port                      = each.value
}

resource "aws_efs_file_system" "home" {
  encrypted       = true
  throughput_mode = "elastic"
}

resource "aws_efs_mount_target" "home" {
  count = length(local.zones)

  file_system_id  = aws_efs_file_system.home.id
  subnet_id       = module.vpc.private_subnets[count.index]
  security_groups = [aws_security_group.storage.id]
}

resource "aws_db_instance" "registry" {
  identifier     = "${local.name}-registry"
  engine         = "postgres"
  engine_version = "17"
  instance_class = "db.t4g.small"
  multi_az       = true

  db_name                     = "torchrelay"
  username                    = "torchrelay"
  manage_master_user_password = true # in Secrets Manager

  allocated_storage         = 20
  storage_encrypted         = true
  backup_retention_period   = 7
  deletion_protection       = true
  final_snapshot_identifier = "${local.name}-registry-final"

  db_subnet_group_name   = module.vpc.database_subnet_group_name
  vpc_security_group_ids = [aws_security_group.storage.id]
}
