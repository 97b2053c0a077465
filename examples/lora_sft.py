"""LoRA fine-tuning with TRL: a script that names nothing of hf_compat, on Lightning's engine.

    hf-compat run lora_sft.py --output_dir FOLDER

Shows: TRL's `SFTTrainer` and PEFT, unchanged, by `hf-compat run`. With `python lora_sft.py` it is transformers' engine
that trains. In a notebook `import hf_compat; hf_compat.patch()` in the first cell does the same.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


def make_tokenizer(texts) -> PreTrainedTokenizerFast:
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=800, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="<pad>", eos_token="</s>")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="trainer_output/lora_sft")
    output_dir = parser.parse_args().output_dir
    set_seed(0)  # the model's first weights are drawn from it
    texts = [text for text in topics["debugger"].split("\n\n") if len(text) > 60]
    tokenizer = make_tokenizer(texts)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=output_dir,
            num_train_epochs=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            max_length=64,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict({"text": texts[8:]}),
        eval_dataset=Dataset.from_dict({"text": texts[:8]}),
        processing_class=tokenizer,
        # the head has never been trained, so it is trained as a whole
        peft_config=LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.save_model()
    trained, every = trainer.model.get_nb_trainable_parameters()
    print(f"trained parameters: {trained:,} of {every:,}")
    print(f"loss on held-out text: {before:.3f} before, {trainer.evaluate()['eval_loss']:.3f} after")
    print(f"adapter: {Path(output_dir) / 'adapter_model.safetensors'}")
    print("engine:", "Lightning" if hasattr(trainer, "lightning_trainer") else "transformers")


if __name__ == "__main__":
    main()
