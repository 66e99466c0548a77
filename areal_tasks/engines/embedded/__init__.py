"""The embedded inference server: SGLang's native API over plain transformers, for machines without an accelerator."""
