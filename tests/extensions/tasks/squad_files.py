"""Files and questions of SQuAD."""

import json

from megatron.extensions.tasks.data.squad import Question


def squad_file(path, *entries, context="a b c d", indent=None):
    paragraphs = [{"context": context, "qas": [*entries]}]
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}, indent=indent))
    return path


def entry(text="b c", start=2, uid="q1", question="e f", **others):
    answers = [{"text": text, "answer_start": start}] if text is not None else []
    return {"id": uid, "question": question, "answers": answers} | others


def asked(context, answer=None, text="g h", uid="q"):
    if answer is None:
        return Question(uid, text, context)
    return Question(uid, text, context, (answer,), context.index(answer))
