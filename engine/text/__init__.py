"""Everything about text: tokenizer, chat template, detokenizer, stop strings; no torch, no model.

`TextStage` (engine.text.stage) is the entry: requests become token ids, token ids become text.
"""
