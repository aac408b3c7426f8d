output "kubeconfig" {
  description = "The command that adds the cluster to kubectl."
  value       = "aws eks update-kubeconfig --region ${var.region} --name ${module.eks.cluster_name}"
}

output "image" {
  description = "The repository to push the image to."
  value       = aws_ecr_repository.torchrelay.repository_url
}

output "bucket" {
  description = "The bucket of the models."
  value       = aws_s3_bucket.models.id
}

output "file_system" {
  description = "The EFS file system of the storage class efs-sc."
  value       = aws_efs_file_system.home.id
}

output "database" {
  description = "The host of PostgreSQL, and the secret in Secrets Manager with its user and password."
  value = {
    host   = aws_db_instance.registry.address
    secret = aws_db_instance.registry.master_user_secret[0].secret_arn
  }
}

output "karpenter" {
  description = "Values of Karpenter's chart: settings.clusterName and settings.interruptionQueue."
  value = {
    cluster = module.eks.cluster_name
    queue   = module.karpenter.queue_name
  }
}
