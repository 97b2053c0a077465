from transformers import Trainer, TrainingArguments, ViTFeatureExtractor, ViTForImageClassification

extractor = ViTFeatureExtractor.from_pretrained("google/vit-base-patch16-224")
args = TrainingArguments("out", evaluation_strategy="epoch", remove_unused_columns=False)
trainer = Trainer(ViTForImageClassification.from_pretrained("x"), args, tokenizer=extractor)
trainer.train()
