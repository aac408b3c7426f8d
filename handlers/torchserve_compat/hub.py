"""A download of models from the Hugging Face Hub."""

from __future__ import annotations


def download_model(
    model_id: str = "meta-llama/Meta-Llama-3.1-8B-Instruct",
    revision: str = "main",
    model_path: str = ".cache",
    use_auth_token: bool | str = True,
) -> str:
    """Return the local folder of a model's PyTorch weights and tokenizer, downloaded to the cache
    ``model_path``.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            "download_model needs huggingface_hub, which is not installed where the model runs: name it in "
            "the archive's requirements."
        ) from error
    weights = ["*.pt", "*.pth", "*.bin", "*.safetensors", "original/*"]
    tokenizer = ["*.json", "*.txt", "*.model"]
    return snapshot_download(
        repo_id=model_id,
        revision=revision,
        allow_patterns=[*weights, *tokenizer],
        cache_dir=model_path,
        token=use_auth_token,
    )
