"""Tool calls as model families write them: one file per form, read off the model's chat template."""
