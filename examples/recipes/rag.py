"""Answer a question from the pages of a folder with LangChain: embed, search, rerank, and let a model write the answer.

    python examples/recipes/rag.py FOLDER QUESTION --url URL --embed MODEL --rerank MODEL --chat MODEL

Needs ``pip install langchain-openai langchain-cohere numpy``.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

PROMPT = "Answer the question in one sentence, from the text only.\n\nText: {text}\n\nQuestion: {question}"
FOUND, KEPT = 20, 2


def passages(folder: Path) -> list[Document]:
    """The paragraphs of all Markdown files, each with its page."""
    return [
        Document(" ".join(text.split()), metadata={"page": page.name})
        for page in sorted(folder.glob("*.md"))
        for text in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S))
        if len(text) > 80 and not text.startswith(("|", "#", "<"))
    ]


def main() -> None:
    """Print the passages that were used, and the answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--embed", default="all-MiniLM-L6-v2")
    parser.add_argument("--rerank", default="all-MiniLM-L6-v2")
    parser.add_argument("--chat", default="SmolLM2-135M-Instruct")
    given = parser.parse_args()
    v1 = f"{given.url}/v1"
    # Without the last argument LangChain sends token ids of OpenAI's tokeniser, which mean other texts here.
    embeddings = OpenAIEmbeddings(model=given.embed, base_url=v1, api_key="none", check_embedding_ctx_length=False)
    store = InMemoryVectorStore(embeddings)
    documents = passages(given.folder)
    store.add_documents(documents)
    found = store.similarity_search(given.question, k=FOUND)
    reranker = CohereRerank(model=given.rerank, base_url=given.url, cohere_api_key="none", top_n=KEPT)
    best = reranker.compress_documents(found, given.question)
    print(f"{len(documents)} passages; {len(found)} found, {len(best)} kept:")
    for document in best:
        print(f"  {document.metadata['relevance_score']:.3f} {document.metadata['page']}: {document.page_content[:90]}…")
    chat = ChatOpenAI(model=given.chat, base_url=v1, api_key="none", temperature=0, max_completion_tokens=80)
    text = "\n".join(document.page_content for document in best)
    print(chat.invoke(PROMPT.format(text=text, question=given.question)).content)


if __name__ == "__main__":
    main()
