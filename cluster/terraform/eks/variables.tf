variable "region" {
  description = "The region of AWS."
  type        = string
}

variable "kubernetes_version" {
  description = "The version of Kubernetes."
  type        = string
  default     = "1.34"
}

variable "api_cidrs" {
  description = "The addresses that reach the API server of Kubernetes from outside; none by default."
  type        = list(string)
  default     = []
}
