"""XLM-RoBERTa (Conneau et al. 2019, https://arxiv.org/abs/1911.02116): RoBERTa in a hundred languages."""

from engine.models.roberta import Model, ModelConfig

__all__ = ["Model", "ModelConfig"]
