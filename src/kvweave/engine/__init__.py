"""The only place where the parts meet.

engine               a knowledge base as users hold it; what its calls go to
  questions          ask, stream: checked, then repeats or the pipeline
    pipeline         one request, from question to answer
  additions          add: made of what is settled, then indexing
  documents          list, remove
  conversations      chat
  idle               what is done while nobody asks
"""
