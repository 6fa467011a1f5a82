"""The only place where the parts meet: a knowledge base (`knowledge_base`) and what its calls go to.

ask          `answering/ask` checks a question, `answering/settings` completes its options, `answering/pipeline` answers it
add          `documents/indexing`
chat         `conversations/conversation`
serve        `serving/serving`
idle         `background/runner`, `background/jobs`, `background/prediction`
"""
