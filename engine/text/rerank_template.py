"""What a decoder reads that was trained to answer "yes" or "no" to whether a document meets a query.

The words are those of the model card of Qwen3-Reranker, which was trained on them; the files of the model do not
have them: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.  Used by `engine.text.pooling_stage`.
"""

from __future__ import annotations

BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def question(instruction: str, query: str, document: str) -> str:
    """What stands between `BEFORE` and `AFTER`; the document comes last, so that what is the same can be cached."""
    return f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
