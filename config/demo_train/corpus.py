"""The synthetic corpus of the demo model: chat questions with checkable answers.

Every sample has a key that names its content apart from the wording: the pair of numbers, the word,
the facts of the story. A hash of the key puts it in the train, valid or heldout part, so no wording
of a held-out question is ever trained on. The same seed gives the same corpus.
"""
import hashlib
import random
import re
import string
from collections import namedtuple
from pathlib import Path

# check: a regexp that a right answer matches. follow: (question, answer) pairs that refer back to it.
Sample = namedtuple("Sample", "task question answer check key follow", defaults=[()])

WORDS = sorted(set((Path(__file__).parent / "words.txt").read_text().split()))
ANIMALS = "fox bear cat dog rabbit owl frog mouse wolf tiger".split()
NAMES = "Tom Anna Ben Lucy Max Emma".split()
THINGS = "hat scarf bag coat drum ball kite cup boat umbrella".split()
COLOURS = "red blue green yellow black white pink brown orange purple".split()
MORE_COLOURS = COLOURS + "grey gray silver golden violet gold".split()
SIZES = "big small tiny huge".split()
STORY_WORDS = ANIMALS + THINGS + COLOURS + SIZES
SHARES = {"add": 17, "sub": 20, "spell": 6, "reverse": 13, "count": 8, "occur": 8, "sort": 12,
          "story": 18, "chat": 5}
WHAT_I_DO = ("I can add and subtract two-digit numbers, spell and reverse words, count letters, "
             "sort three numbers and answer questions about a short story.")
WHO = "I am the demo model of Tandem, a small mixture of experts."


def part(key):
    """The part that the content named by key belongs to: train, valid or heldout."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100
    return "heldout" if bucket < 6 else "valid" if bucket < 10 else "train"


def word_part(word):
    """Words of the stories are single tokens: their spelling can only be learned by seeing it."""
    return "train" if word in STORY_WORDS else part("word " + word)


COMMON = [w for w in WORDS if word_part(w) == "train"]  # where a word is not the task


def say(rng, text):
    """A user's wording: please or not, a mark at the end or not, a capital at the start or not."""
    mark = text[-1] if text[-1] in "?." else ""
    text = text[:-1] if mark else text
    r = rng.random()
    asks = mark == "?" and "=" not in text
    if text[-1] == "=":
        pass
    elif r < 0.08 and not asks:
        text = "Please " + text[0].lower() + text[1:]
    elif r < 0.14:
        text = text + " please"
    elif r < 0.18:
        text = text + ", please"
    elif r < 0.21 and asks:
        text = rng.choice(["Tell me, ", "Please tell me: ", "Hi, ", "Hello! "]) + text[0].lower() + text[1:]
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.75:
        text += mark
    return text


def number(rng):
    r = rng.random()
    return rng.randint(10, 99) if r < 0.94 else rng.randint(0, 99) if r < 0.97 else rng.randint(0, 9)


ADD_WORDS = ["What is {a} plus {b}?", "How much is {a} plus {b}?", "What's {a} plus {b}?",
             "Calculate {a} plus {b}.", "{a} plus {b}", "Add {a} and {b}.", "What is the sum of {a} and {b}?",
             "What do you get if you add {a} and {b}?", "Compute {a} plus {b}.", "What does {a} plus {b} make?",
             "Add {b} to {a}."]
ADD_SIGNS = ["{a} + {b} =", "{a}+{b}=", "What is {a} + {b}?", "{a} + {b}", "What is {a}+{b}?", "{a} + {b} = ?",
             "Calculate {a} + {b}."]
SUB_WORDS = ["What is {a} minus {b}?", "How much is {a} minus {b}?", "What's {a} minus {b}?",
             "Calculate {a} minus {b}.", "{a} minus {b}", "Subtract {b} from {a}.", "Take {b} away from {a}.",
             "What is {a} take away {b}?", "What is the difference between {a} and {b}?", "Compute {a} minus {b}.",
             "What do you get if you subtract {b} from {a}?"]
SUB_SIGNS = ["{a} - {b} =", "{a}-{b}=", "What is {a} - {b}?", "{a} - {b}", "What is {a}-{b}?", "{a} - {b} = ?",
             "Calculate {a} - {b}."]


def last_number(n):
    return rf"(^|[^\d-]){re.escape(str(n))}\.?$"


def sum_question(rng, words, signs, name, sign, a, b, result):
    if rng.random() < 0.65:
        form = rng.choice(words if rng.random() < 0.6 else words[:3])
        answer = f"{a} {name} {b} is {result}."
    else:
        form, answer = rng.choice(signs), f"{a} {sign} {b} = {result}"
    return say(rng, form.format(a=a, b=b)), answer, last_number(result)


def add(rng):
    a, b = number(rng), number(rng)
    key = f"add {min(a, b)} {max(a, b)}"
    return Sample("add", *sum_question(rng, ADD_WORDS, ADD_SIGNS, "plus", "+", a, b, a + b), key)


def sub(rng, negative=0.05):
    a, b = number(rng), number(rng)
    if a < b and rng.random() > negative:
        a, b = b, a
    return Sample("sub", *sum_question(rng, SUB_WORDS, SUB_SIGNS, "minus", "-", a, b, a - b), f"sub {a} {b}")


def made_up(rng):
    """A pronounceable or a random word of 3 to 9 letters."""
    n = rng.choice([3, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 8, 8, 9])
    if rng.random() < 0.3:
        return "".join(rng.choice(string.ascii_lowercase) for _ in range(n))
    if rng.random() < 0.5:
        # The start of one word and the end of another: the letter pairs of English.
        one, two = rng.choice(WORDS), rng.choice(WORDS)
        word = one[:rng.randint(1, len(one))] + two[rng.randint(0, len(two) - 1):]
        return word[:10] if len(word) > 2 else word + rng.choice(WORDS)[:3]
    word = ""
    while len(word) < n:
        word += rng.choice("b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl gr pl pr sh sl sp st th tr".split())
        word += rng.choice("a e i o u ai ea ee oo ou a e i o".split())
        if rng.random() < 0.3:
            word += rng.choice("l m n r s t ss ll tt nd nt ck".split())
    return word[:n]


def task_word(rng, where):
    r = rng.random()
    if where != "train" or r < 0.45:
        return rng.choice(WORDS)
    return rng.choice(STORY_WORDS) if r < 0.5 else made_up(rng)


def quoted(rng, word):
    r = rng.random()
    if r > 0.96:
        return word.capitalize()
    return f'"{word}"' if r < 0.15 else f"'{word}'" if r < 0.2 else word


SPELL = ["Spell the word {w}.", "Spell {w}.", "How do you spell {w}?", "Can you spell {w}?", "Spell out {w}.",
         "How is the word {w} spelled?", "Spell the word {w} letter by letter.", "Can you spell the word {w}?"]
REVERSE = ["Reverse the word {w}.", "Reverse {w}.", "Write {w} backwards.", "What is {w} backwards?",
           "Can you reverse the word {w}?", "Write the word {w} in reverse.", "Spell {w} backwards.",
           "What is the reverse of {w}?"]
COUNT = ["How many letters are in {w}?", "How many letters are in the word {w}?", "How many letters does {w} have?",
         "Count the letters in {w}.", "How long is the word {w}?", "How many letters are there in {w}?",
         "Count the letters in the word {w}.", "How many letters does the word {w} have?"]
OCCUR = ["How many times does {c} appear in {w}?", "How many times does {c} appear in the word {w}?",
         "How many times does the letter {c} appear in {w}?", "How often does {c} occur in {w}?",
         "Count the letter {c} in {w}.", "How many {c}'s are in {w}?", "How many {c}s are in {w}?",
         "How many times is {c} in {w}?"]


def word_task(rng, forms, task, where, answer, check, **more):
    word = task_word(rng, where)
    question = say(rng, rng.choice(forms).format(w=quoted(rng, word), **more))
    return Sample(task, question, answer(word), check(word), "word " + word)


def spell(rng, where):
    return word_task(rng, SPELL, "spell", where, "-".join, lambda w: f"^{'-'.join(w)}\\.?$")


def reverse(rng, where):
    return word_task(rng, REVERSE, "reverse", where, lambda w: w[::-1], lambda w: f"^{w[::-1]}\\.?$")


def count(rng, where):
    return word_task(rng, COUNT, "count", where, lambda w: f"{'-'.join(w)} has {len(w)} letters.",
                     lambda w: rf"\b{len(w)}\b")


def occur(rng, where):
    word = task_word(rng, where)
    c = rng.choice(word) if rng.random() < 0.85 else rng.choice(string.ascii_lowercase)
    n = word.count(c)
    question = say(rng, rng.choice(OCCUR).format(w=quoted(rng, word), c=c))
    answer = f"{'-'.join(word)} has {c} {n} time{'' if n == 1 else 's'}."
    return Sample("occur", question, answer, rf"\b{n}\b", "word " + word)


SORT = ["Sort {a}, {b} and {c}.", "Sort {a}, {b}, {c}.", "Sort the numbers {a}, {b} and {c}.",
        "Sort these numbers: {a}, {b}, {c}.", "Sort {a} {b} {c}.", "Put {a}, {b} and {c} in order.",
        "Order the numbers {a}, {b}, {c}.", "Arrange {a}, {b} and {c} from smallest to largest.",
        "Sort the three numbers {a}, {b} and {c}.", "Sort {a}, {b}, and {c}.",
        "Sort {a}, {b} and {c} from small to large."]


def sort(rng):
    numbers = [number(rng) for _ in range(3)]
    if rng.random() < 0.15:
        numbers[1] = numbers[0] // 10 * 10 + rng.randint(0, 9)
        rng.shuffle(numbers)
    a, b, c = numbers
    right = sorted(numbers)
    question = say(rng, rng.choice(SORT).format(a=a, b=b, c=c))
    return Sample("sort", question, ", ".join(map(str, right)),
                  r"^\D*" + r"\D+".join(map(str, right)) + r"\D*$", f"sort {right}")


STORY_OPEN = ["", "", "", "Once upon a time there was a party. ", "One day some friends went to the river. ",
              "It was a sunny day. ", "Long ago, in a forest, some friends met. ", "Here is a story. ", "Story: "]
STORY_LINK = ["", "", "", "", "They were good friends. ", "Then it began to rain. ", "Everybody was happy. "]
STORY_END = ["", "", "", "They all went home. ", "Then they had dinner. ", "The end. "]
HAS = ["has", "has", "had", "wears", "carries", "found", "got", "bought", "wore", "carried", "likes"]
ASK_COLOUR = ["What colour is {o} {t}?", "What color is {o} {t}?", "Which colour is {o} {t}?",
              "What is the colour of {o} {t}?", "What colour was {o} {t}?"]
ASK_SIZE = ["How big is {o} {t}?", "What size is {o} {t}?", "Is {o} {t} big or small?",
            "What is the size of {o} {t}?"]


def ask_fact(rng, facts):
    """A question about one of the facts (owner, verb, thing, colour, size), its answer and the check.
    The answer says the sentence of the story again, which is how a small model finds the right owner."""
    o, verb, t, c, s = rng.choice(facts)
    who = o if o in NAMES else f"the {o}"
    size = bool(s) and rng.random() < 0.5
    question = rng.choice(ASK_SIZE if size else ASK_COLOUR).format(o=f"{who}'s", t=t)
    if rng.random() < 0.15:
        question = question[:-1]
    answer = f"{who} {verb} {described(s, c, t)}."
    check = rf"(?i)^{who} \w+ an? ((?:{'|'.join(SIZES)}) )?{c} {t}\.?$"
    if size:
        check = rf"(?i)^{who} \w+ an? {s} (\w+ )?{t}\.?$"
    return question, answer[0].upper() + answer[1:], check


def described(size, colour, thing):
    words = f"{size} {colour} {thing}".strip()
    return ("an " if words[0] in "aeiou" else "a ") + words


def story(rng):
    n = rng.choice([1, 2, 2, 2, 3, 3, 4])
    r = rng.random()
    # Some stories have owners and things from outside the lists, so that copying is learned, not lists.
    owners = rng.sample(ANIMALS + NAMES if r < 0.9 else COMMON, n)
    things = rng.sample(THINGS if r < 0.85 else COMMON, n)
    if rng.random() < 0.3:
        things = [rng.choice(things) for _ in range(n)]
    colours = rng.sample(COLOURS if r < 0.93 else MORE_COLOURS, n)
    sizes = [rng.choice(SIZES) if rng.random() < 0.6 else "" for _ in range(n)]
    verb = rng.choice(HAS)
    text, facts = rng.choice(STORY_OPEN), []
    joined = n == 2 and rng.random() < 0.4
    for i, (o, t, c, s) in enumerate(zip(owners, things, colours, sizes)):
        a = "An " if o[0] in "aeiou" else "A "
        who = o if o in NAMES else ("the " if i and joined else rng.choice(["The ", "The ", a])) + o
        facts.append((o, verb, t, c, s))
        text += f"{who} {verb} {described(s, c, t)}" + (" and " if joined and not i else ". ")
        if rng.random() < 0.3:
            verb = rng.choice(HAS)
        if not joined and i < n - 1:
            text += rng.choice(STORY_LINK)
    text += rng.choice(STORY_END)
    text = text[:-1] + rng.choice([" ", " ", " ", "\n"])
    question, answer, check = ask_fact(rng, facts)
    follow = [ask_fact(rng, facts)[:2] for _ in range(rng.choice([0, 0, 1, 2, 3]))]
    return Sample("story", text + question, answer, check, f"story {sorted(zip(owners, things, colours, sizes))}", follow)


TALK = [
    ("Hello! " + WHO + " " + WHAT_I_DO, "Hello|Hi|Hey|Hello there|Hi there|Good morning|Good evening|Hello!|Hi!|Hey there"),
    (WHO + " " + WHAT_I_DO, "Who are you?|What are you?|What is your name?|Tell me about yourself.|Who is this?|"
     "Introduce yourself.|What's your name?|Are you an AI?|Are you a robot?|What model are you?|Who made you?"),
    (WHAT_I_DO, "What can you do?|What can I ask you?|Help|How can you help me?|What are you able to do?|"
     "What do you know?|What are your skills?|Help me.|What questions can you answer?|What can I ask?"),
    ("You are welcome!", "Thank you|Thanks|Thanks a lot|Thank you very much|Great, thanks|Thank you!|Thanks!|Great|Well done|Nice"),
    ("Goodbye!", "Bye|Goodbye|See you|See you later|Bye bye|Good night"),
    ("I am fine, thank you!", "How are you?|How do you do?|How are you today?|Are you well?"),
]
UNKNOWN = ("What is the capital of {n}?|Who wrote {n}?|Tell me a joke.|Why is the sky blue?|What is the meaning of life?|"
           "Write a poem about a {w}.|Tell me a story about a {w}.|Who is the president of {n}?|What is a {w}?|"
           "What time is it?|What is the weather like in {n}?|How do I cook a {w}?|Where is the {w}?|"
           "Translate {w} to French.|Where is {n}?|Write a program in C.|Do you like {w}?|When was {n} born?|"
           "What is the best {w}?|Explain {w}.|What does {w} mean?|Give me a recipe for {w}.|Who invented the {w}?|"
           "Is {n} far away?|Play some music.|Why do people like {w}?|How old is the {w}?|What is love?|"
           "Sing a song about {n}.|How far is the moon?|What year is it?|Recommend a book about {w}.|Do you speak {n}?|"
           "What is {d} times {e}?|What is {d} divided by {e}?|{d} * {e}|{d} x {e}|What is {f} plus {g}?|"
           "What is {f} minus {g}?|{f} + {g}|What is {f} + {e}?|Multiply {d} by {e}.|What is the square root of {d}?|"
           "{w}|{w} {v}|{n} {w} {v}|I like {w}.|The {w} is in the {v}.|Where can I buy a {w}?|Can you {w} the {v}?|"
           "What is a {w} {v}?|My {w} is {v}.|Why?|What?|Do it again.|Compare {w} and {v}.|Draw a {w}.").split("|")
DEFAULT = "I do not know that. " + WHAT_I_DO

SYSTEM = ["You are a helpful assistant.", "You are Tandem.", "Answer briefly.", "You are a friendly robot.",
          "You are a helpful assistant. Keep your answers short.", "Be kind.", "You are a math tutor."]


def chat(rng):
    if rng.random() < 0.5:
        answer, asked = rng.choice(TALK)
        question, check = rng.choice(asked.split("|")), "^" + re.escape(answer[:8])
    else:
        word = rng.choice(COMMON) if rng.random() < 0.7 else made_up(rng)
        name = rng.choice([rng.choice(COMMON), made_up(rng)]).capitalize()
        fields = dict(w=word, n=name, v=rng.choice(COMMON), d=rng.randint(0, 99), e=rng.randint(0, 99),
                      f=rng.randint(100, 999), g=rng.randint(100, 999))
        question, answer, check = rng.choice(UNKNOWN).format(**fields), DEFAULT, "^I do not know"
    r = rng.random()
    if r < 0.15:
        question = question.rstrip("?.!")
    elif r < 0.3:
        question = question[0].lower() + question[1:]
    elif r < 0.33:
        question = question.upper()
    return Sample("chat", question, answer, check, "chat")


MAKERS = {"add": lambda r, w: add(r), "sub": lambda r, w: sub(r, 0.05 if w == "train" else 0.0), "spell": spell,
          "reverse": reverse, "count": count, "occur": occur, "sort": lambda r, w: sort(r),
          "story": lambda r, w: story(r), "chat": lambda r, w: chat(r)}


def belongs(sample, where):
    if sample.task == "chat":
        return True
    if sample.key.startswith("word "):
        return word_part(sample.key[5:]) == where
    return part(sample.key) == where


def draw(rng, where, task=None):
    """One sample of the part `where`, of the given task or of one drawn by SHARES."""
    task = task or rng.choices(list(SHARES), SHARES.values())[0]
    while True:
        sample = MAKERS[task](rng, where)
        if belongs(sample, where):
            return sample


def heldout(seed=2024):
    """The 100 held-out questions: balanced over the checkable tasks, two-digit numbers only."""
    rng = random.Random(seed)
    counts = {"add": 18, "sub": 18, "spell": 10, "reverse": 12, "count": 10, "occur": 5, "sort": 12, "story": 15}
    out, seen = [], set()
    for task, n in counts.items():
        while n:
            sample = draw(rng, "heldout", task)
            if sample.question in seen or any(len(d) < 2 for d in re.findall(r"\d+", sample.question)):
                continue
            seen.add(sample.question)
            out.append(sample)
            n -= 1
    return out


if __name__ == "__main__":
    rng = random.Random(1)
    for task in SHARES:
        for _ in range(8):
            s = draw(rng, "train", task)
            print(f"{task:8} {s.question!r} -> {s.answer!r}   /{s.check}/")
