"""Tiny random networks of `transformers` with adapters of `peft`, as people make them."""

import torch
from torch import nn

VOCABULARY, LENGTH, CLASSES = 20, 6, 3


def bert(hidden=16, layers=1, lora=True):
    """A BERT classifier; with `lora`, only adapters and the classifier are trained."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    network = BertForSequenceClassification(config)
    return _with_lora(network, ["query", "value"]) if lora else network


def gpt(hidden=16):
    """A GPT-2 classifier with adapters."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    sizes = {"n_embd": hidden, "n_layer": 1, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    config = GPT2Config(
        **sizes,
        num_labels=CLASSES,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _with_lora(GPT2ForSequenceClassification(config), ["c_attn"], transposed=True)


def _with_lora(network, targets, transposed=False):
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets, fan_in_fan_out=transposed
    )
    return get_peft_model(network, config)


class Adapted(nn.Module):
    """A frozen body of some depth, and an adapter and a head of the same shapes in all of them."""

    def __init__(self, depth=1, frozen=True):
        super().__init__()
        self.body = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(6, 6), nn.Tanh())))
        self.adapter = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)
        if frozen:
            self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.relu(self.adapter(self.body(x))))
