"""The only place where the parts meet: a knowledge base (`knowledge_base`) and what its calls go to.

ask          `ask` checks a question, `settings` completes its options, `pipeline` answers it
add          `indexing`
chat         `conversation`
idle         `background`, `background_jobs`, `question_prediction`
"""
