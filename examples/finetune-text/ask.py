"""Asks the tuned model with transformers only."""

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

TEXTS = ["turn the lights off in the garden", "it is too cold in the attic", "stop the song"]

tokenizer = AutoTokenizer.from_pretrained("bert")
model = AutoModelForSequenceClassification.from_pretrained("tuned")
batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
batch.pop("token_type_ids", None)
with torch.no_grad():
    labels = model(**batch).logits.argmax(-1)
for text, label in zip(TEXTS, labels.tolist(), strict=True):
    print(f"{model.config.id2label[label]}: {text}")
