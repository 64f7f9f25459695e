# ruff: noqa: E501  (a template is read as a whole)
"""Seeded prompts of many kinds, for training data: a few templates times long word lists.

`generate_prompts(n, seed=s)` is a pure function; a longer list starts with the shorter one. The kinds are
those that a chat model is asked in daily use: code, arithmetic, word problems, explanations, lists,
stories, letters, advice, rewriting, dialogue, summaries and facts. What the answers look like matters
here, not whether they are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from dspark_build.prompt_files import Prompt, fingerprint

__all__ = ["KINDS", "generate_prompts", "items", "take_in_turn", "word_problem"]


def items(text: str) -> list[str]:
    """Return the items of a list that is written with semicolons."""
    return [" ".join(item.split()) for item in text.split(";")]


NAMES = items(
    """
    Ada; Ben; Chloe; Dario; Elif; Farid; Greta; Hugo; Ines; Jonas; Kira; Leo; Mina; Noel; Oona; Pavel;
    Quinn; Rosa; Sami; Tara; Umar; Vera; Wim; Xenia; Yusuf; Zoe; Amir; Bella; Carlos; Dina; Emil;
    Fatima; Gus; Hana; Ivan; Julia; Kofi; Lucia; Marek; Nadia; Oscar; Priya
    """
)
THINGS = items(
    """
    apples; books; coins; marbles; pencils; stamps; cookies; tickets; balloons; shells; cards; flowers;
    bottles; eggs; bricks; candles; oranges; photos; buttons; chairs; plates; beads; toys; letters;
    lemons; notebooks; lamps; keys; socks; maps
    """
)
PLACES = items(
    """
    a harbour; an old library; a mountain hut; a night market; a space station; a small bakery; a desert
    town; a train at dawn; a rainy island; a school playground; a busy airport; an empty theatre; a
    river in spring; a castle ruin; a hospital corridor; a vineyard; a fishing village; a city roof; a
    frozen lake; a jungle camp; a clock tower; a farm in autumn
    """
)
HEROES = items(
    """
    a shy dragon; a retired pilot; two sisters; a clever crow; a young baker; a robot gardener; an old
    sailor; a lost puppy; a curious child; a tired detective; a kind giant; a travelling musician; a
    brave mouse; a forgetful wizard; a night nurse; a bored prince; a beekeeper; a street painter; a
    blind clockmaker; a stubborn goat
    """
)
EVENTS = items(
    """
    finds a hidden door; loses something precious; meets an unexpected friend; has to tell the truth;
    learns to be patient; saves the day by accident; misses the last boat; opens a strange letter; hears
    a song from far away; makes a big mistake; discovers a map; repairs an old machine; breaks a
    promise; keeps a secret; wins a contest; gets lost in the fog
    """
)
TOPICS = items(
    """
    volcanoes; black holes; the water cycle; vaccines; inflation; electric cars; the French Revolution;
    dreams; coral reefs; bees; the stock market; gravity; the printing press; plate tectonics; sleep;
    the Roman Empire; recycling; DNA; the Silk Road; glaciers; democracy; solar panels; whales; chess;
    the Olympic Games; coffee; magnets; rainforests; the human heart; memory; batteries; tides; the
    Moon; antibiotics; earthquakes; the Renaissance; computer viruses; supply and demand; photosynthesis
    in algae; migration of birds; the immune system; paper making; wind power; the internet; the ozone
    layer; cheese; dinosaurs; jazz; blockchain; machine learning; the digestive system; rainbows;
    nuclear energy; the Great Wall of China; evolution; money; bridges; salt; lightning; the Industrial
    Revolution; fermentation; steel; the nervous system; comets
    """
)
AUDIENCES = items(
    """
    a child of eight; a curious teenager; someone who has never heard of it; a university student; my
    grandmother; a busy manager; a visitor from another planet; a beginner
    """
)
SKILLS = items(
    """
    cooking rice; swimming; touch typing; speaking in public; drawing faces; growing tomatoes; saving
    money; learning Spanish; playing the piano; taking photos at night; writing a novel; baking bread;
    meditating; chess openings; yoga; making friends; sewing; riding a bicycle; gardening on a balcony;
    keeping a diary; mental arithmetic; knitting; hiking alone; time management; reading faster; waking
    up early; cleaning a kitchen; negotiating a salary; first aid; training a dog
    """
)
FUNCTIONS = items(
    """
    returns the largest of three numbers; counts the words in a sentence; reverses the words of a
    sentence; sums the digits of an integer; checks whether a number is prime; removes all punctuation
    from a string; finds the most common element of a list; converts Celsius to Fahrenheit; flattens a
    nested list; computes a factorial; checks whether two strings are anagrams; rotates a list by k
    places; finds the second largest value in a list; groups words by their first letter; converts a
    Roman numeral to an integer; splits a list into chunks of n items; finds all pairs that add up to a
    target; computes the greatest common divisor; capitalises every word; validates an e-mail address;
    computes a running mean; transposes a matrix; counts how often each character occurs; removes the
    duplicates of a list and keeps the order; sorts a list of dictionaries by a key; merges two
    dictionaries; finds the longest word in a text; generates a random password; computes compound
    interest; converts seconds to hours, minutes and seconds; reads a JSON file and returns its keys;
    finds the missing number in a range; checks balanced brackets; performs a binary search; computes
    the distance of two points; prints a multiplication table; draws a triangle of stars; simulates a
    dice roll; encodes a text with a Caesar cipher; counts the lines of a file; finds the intersection
    of two lists; computes the n-th triangular number; converts a decimal number to binary; checks a
    password for strength; parses a date string; computes a median; finds all prime numbers below n;
    interleaves two lists; replaces every vowel with a star; squares every even number
    """
)
LANGUAGES = items(
    """
    Python; Python; Python; JavaScript; C; C++; Java; Go; Rust; TypeScript; Ruby; PHP; Kotlin; Bash
    """
)
CLASSES = items(
    """
    bank account; shopping cart; library with books; queue; linked list; to-do list; temperature sensor;
    card deck; parking lot; student with grades; playlist; inventory; matrix; binary tree; timer; phone
    book; vending machine; chess board; LRU cache; counter
    """
)
QUERIES = items(
    """
    the ten customers with the most orders; all products that were never sold; the total revenue of each
    month; users who signed up in the last week; the average rating of each film; duplicate e-mail
    addresses; employees who earn more than their manager; the number of orders per country; the three
    cheapest products of each category; books that are overdue
    """
)
CODE_TOPICS = items(
    """
    recursion; a hash table; an API; version control; object-oriented programming; a for loop;
    exceptions; a pointer; unit testing; big O notation; a closure; multithreading; a database index;
    garbage collection; a lambda function; inheritance; a virtual environment; regular expressions;
    asynchronous code; a compiler; type hints; a generator; dependency injection; JSON
    """
)
SENTENCES = items(
    """
    i think we should of met earlier because the traffic were bad; The report was wrote by me and it
    have many informations; Thanks for nothing, your product broke after two days!; We gotta fix this
    thing before the boss sees it; Me and him goes to the gym every days; The meeting has been moved,
    nobody told me, and now I am late; This movie is kind of boring but the music is really nice; Please
    do the needful and revert back to me; She dont like neither coffee nor tea; There is many reason why
    people moves to the city; I am writing to you because of that I want to complain about the noise;
    Your so good in cooking; Yesterday I have seen a film who was very interesting; The dog chased it's
    tail for a hour; Its raining since three days and the river are full; He said that he will come but
    he didnt came; We was waiting at the station when suddenly the train arrives; I could care less
    about there opinion
    """
)
STYLES = items(
    """
    more formal; friendlier; shorter; more polite; in simple words; as a question; in the past tense;
    like a newspaper headline; with correct grammar; more exciting; in the passive voice; for a child
    """
)
LETTERS = items(
    """
    to a neighbour about loud music; to a teacher asking for an extension; to a hotel to cancel a
    booking; to thank a colleague; to invite friends to a barbecue; to complain about a late parcel; to
    apply for a summer job; to a friend who moved away; to ask for a refund; to congratulate someone on
    a new baby; to my team about a new schedule; to apologise for missing a call; to request a day off;
    to a landlord about a leaking tap; to welcome a new employee; to a bank about a lost card; to resign
    from a job; to a city council about a dangerous crossing; to ask a professor for advice; to a gym to
    end a contract
    """
)
PAIRS = items(
    """
    cats and dogs; tea and coffee; books and films; trains and planes; summer and winter; renting and
    buying a flat; mountains and the sea; working at home and in an office; Python and Java; gas and
    electric stoves; mobile phones and cameras; frogs and toads; viruses and bacteria; socialism and
    capitalism; comets and asteroids; butter and oil; running and cycling; bonds and shares; novels and
    short stories; rice and pasta; history and myth; fresh and frozen vegetables; paper and e-books;
    bees and wasps
    """
)
WORRIES = items(
    """
    I cannot concentrate at work; my roommate never cleans; I argue with my brother all the time; I
    spend too much money on clothes; I am afraid of flying; my plants keep dying; I do not know what to
    study; I feel lonely in a new city; my neighbour's dog barks all night; I forget people's names; I
    have too many meetings; my child refuses vegetables; I always arrive late; I want to change my
    career at forty; my computer is very slow; I cannot stop checking my phone; my back hurts after
    sitting; my best friend is angry with me; I failed an exam; I never finish what I start
    """
)
COUNTRIES = items(
    """
    Japan; Brazil; Egypt; Canada; Norway; Kenya; Peru; Vietnam; Greece; India; Mexico; Iceland; Turkey;
    Australia; Portugal; Morocco; Chile; Finland; Thailand; Poland; Nepal; Cuba; Ireland; South Korea;
    Ghana; Switzerland
    """
)
PEOPLE = items(
    """
    Albert Einstein; Cleopatra; Leonardo da Vinci; Nelson Mandela; Isaac Newton; Frida Kahlo; Charles
    Darwin; Ada Lovelace; Mozart; Florence Nightingale; Galileo; Rosa Parks; Nikola Tesla; William
    Shakespeare; Mahatma Gandhi; Jane Austen; Aristotle; Amelia Earhart; Vincent van Gogh; Alan Turing;
    Marco Polo; Joan of Arc; Louis Pasteur; Neil Armstrong
    """
)
DISHES = items(
    """
    pancakes; lentil soup; fried rice; an apple pie; a Greek salad; spaghetti with tomato sauce;
    vegetable curry; scrambled eggs; banana bread; chicken soup; guacamole; potato salad; oatmeal
    cookies; a smoothie; roast vegetables; pizza dough; hummus; an omelette; chocolate mousse; stuffed
    peppers; mushroom risotto; lemonade
    """
)
JOBS = items(
    """
    a nurse; a pilot; a chef; a judge; a farmer; an architect; a journalist; a plumber; a vet; a
    firefighter; a translator
    """
)


def _pick(rng: Random, *lists: list[str]) -> list[str]:
    return [rng.choice(items) for items in lists]


def _function(rng: Random) -> str:
    language, what = rng.choice(LANGUAGES), rng.choice(FUNCTIONS)
    frame = rng.choice(
        (
            "Write a {l} function that {w}.",
            "Write a function in {l} that {w}, with comments.",
            "I need {l} code that {w}. Please include an example call.",
            "Can you show me how to write a {l} function which {w}?",
            "Implement a {l} function that {w} and explain how it works.",
            "Write a {l} program that {w}. Handle bad input.",
        )
    )
    return frame.format(l=language, w=what)


def _code(rng: Random) -> str:
    choice = rng.randrange(5)
    if choice == 0:
        return f"Write a {rng.choice(LANGUAGES[:9])} class for a {rng.choice(CLASSES)} with at least three methods."
    if choice == 1:
        return f"Write a SQL query that returns {rng.choice(QUERIES)}. Invent suitable tables."
    if choice == 2:
        return f"Explain {rng.choice(CODE_TOPICS)} with an example in {rng.choice(LANGUAGES)}."
    if choice == 3:
        return f"Write tests for a {rng.choice(LANGUAGES[:5])} function that {rng.choice(FUNCTIONS)}."
    a, b, c = rng.randrange(2, 9), rng.randrange(10, 40), rng.randrange(2, 5)
    body = rng.choice(
        (
            f"total = 0\nfor i in range({a}, {b}):\n    if i % {c} == 0:\n        total += i\nprint(total)",
            f"def f(n):\n    return 1 if n < {c} else n * f(n - 1)\n\nprint(f({a}))",
            f"words = ['sun', 'moon', 'star']\nprint([w.upper() * {c} for w in words if len(w) > {c}])",
            f"d = {{}}\nfor i in range({b}):\n    d.setdefault(i % {c}, []).append(i)\nprint(d)",
            f"x = {b}\nwhile x > {a}:\n    x -= {c}\nprint(x)",
        )
    )
    question = rng.choice(
        ("What does this Python code do?", "Rewrite this code as a function:", "Explain this line by line:")
    )
    return f"{question}\n\n{body}"


def _arithmetic(rng: Random) -> str:
    a, b, c = rng.randrange(11, 999), rng.randrange(3, 99), rng.randrange(2, 12)
    percent = rng.choice((5, 10, 12, 20, 30, 35, 40, 60, 75))
    return rng.choice(
        (
            f"What is {a} + {b * c}? Show your work.",
            f"Compute {a} * {c} step by step.",
            f"What is {percent}% of {a * 10}?",
            f"Divide {b * c} by {c} and explain the steps.",
            f"Solve for x: {c}x + {b} = {c * (a % 20 + 1) + b}.",
            f"Find the area of a triangle with base {b} cm and height {c} cm.",
            f"What is the perimeter of a rectangle with sides {b} m and {c} m?",
            f"List the first {c + 3} multiples of {b}.",
            f"Write {a} as a product of prime factors.",
            f"What is the average of {a}, {b}, {c} and {a + b}?",
            f"Convert {a} minutes to hours and minutes.",
            f"Which is larger, {c}/{b} or {c + 1}/{b + 3}? Explain.",
            f"If y = {c}x - {b}, what is y when x = {a % 30}?",
            f"Calculate ({b} + {c}) * {c} - {b}.",
        )
    )


def word_problem(rng: Random) -> str:
    first, second = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    a, b, c = rng.randrange(12, 90), rng.randrange(2, 12), rng.randrange(2, 9)
    problem = rng.choice(
        (
            f"{first} has {a} {things} and gives {b} of them to {second}. Then {first} buys {c} more. How many {things} does "
            f"{first} have now?",
            f"{first} buys {b} packs of {things}. Each pack costs {c} dollars. {first} pays with {b * c + a} dollars. How much "
            f"change does {first} get?",
            f"{first} collects {a} {things} on Monday and {c} times as many on Tuesday. How many {things} is that in total?",
            f"{first} shares {b * c} {things} equally among {c} friends. How many does each friend get?",
            f"{first} walks {b} km every day. How far does {first} walk in {c} weeks?",
            f"{first} is {a} years old and {second} is {b} years younger. How old will {second} be in {c} years?",
            f"A shop sells {things} for {c} dollars each. On Saturday it sold {a} and on Sunday {b} fewer. How much money did "
            f"it make?",
            f"{first} reads {a} pages a day. A book has {a * b + c} pages. How many days does {first} need to finish it?",
            f"{first} and {second} together have {a + b} {things}. {first} has {b} more than {second}. How many has each?",
            f"A tank holds {a * b} litres. It is filled with {b} litres every minute and loses 1 litre every minute. How long "
            f"does it take to fill it?",
            f"There are {a} {things} in a box. {first} takes a third of them and {second} takes {c}. How many are left?",
            f"{first} earns {c + 10} dollars an hour and works {b} hours on each of {c} days. How much does {first} earn?",
        )
    )
    tail = rng.choice(
        ("", " Reason step by step.", " Explain your answer.", " Give the final number at the end.")
    )
    return problem + tail


def _explain(rng: Random) -> str:
    topic, audience = _pick(rng, TOPICS, AUDIENCES)
    return rng.choice(
        (
            f"Explain {topic} to {audience}.",
            f"What should everyone know about {topic}?",
            f"Write a short article about {topic}.",
            f"How do scientists or historians study {topic}?",
            f"Give me an introduction to {topic} in three paragraphs.",
            f"What are the most common myths about {topic}?",
            f"Why is it important to know about {topic}?",
            f"Describe {topic} in simple language.",
            f"What are the advantages and disadvantages when it comes to {topic}?",
            f"Summarise what is known about {topic} in five sentences.",
        )
    )


def _listing(rng: Random) -> str:
    number = rng.randrange(3, 11)
    return rng.choice(
        (
            f"List {number} facts about {rng.choice(TOPICS)}.",
            f"Give me {number} tips for {rng.choice(SKILLS)}.",
            f"List {number} things to do in {rng.choice(COUNTRIES)}.",
            f"Name {number} questions to ask {rng.choice(JOBS)}.",
            f"Write a packing list for a week in {rng.choice(COUNTRIES)}.",
            f"Suggest {number} titles for a story in which {rng.choice(HEROES)} {rng.choice(EVENTS)}.",
            f"Make a weekly plan for {rng.choice(SKILLS)}.",
            f"Write a quiz with {number} questions and answers about {rng.choice(TOPICS)}.",
            f"Make a table that compares {rng.choice(PAIRS)}.",
        )
    )


def _story(rng: Random) -> str:
    hero, event, place = _pick(rng, HEROES, EVENTS, PLACES)
    return rng.choice(
        (
            f"Write a short story about {hero} who {event}.",
            f"Tell me a bedtime story set in {place} with {hero}.",
            f"Write the first paragraph of a novel that takes place in {place}.",
            f"Write a poem about {place}.",
            f"Write a funny story in which {hero} {event} in {place}.",
            f"Describe {place} with all five senses.",
            f"Write a diary entry of {hero} on the day when everything changed.",
            f"Continue this story: One evening in {place}, {hero} heard a knock.",
            f"Write a haiku and a limerick about {hero}.",
        )
    )


def _letter(rng: Random) -> str:
    return rng.choice(
        (
            f"Write an e-mail {rng.choice(LETTERS)}.",
            f"Write a short letter {rng.choice(LETTERS)}, in a warm tone.",
            f"Help me write a message {rng.choice(LETTERS)}.",
            f"Write a product description for {rng.choice(THINGS)} made by hand in {rng.choice(COUNTRIES)}.",
            f"Write a speech about {rng.choice(TOPICS)} for {rng.choice(AUDIENCES)}.",
            f"Write a social media post about {rng.choice(SKILLS)}.",
        )
    )


def _advice(rng: Random) -> str:
    worry, skill = _pick(rng, WORRIES, SKILLS)
    return rng.choice(
        (
            f"Lately {worry}. What can I do?",
            f"What would you say to a friend who tells you: {worry}?",
            f"How can I get better at {skill}?",
            f"I want to start with {skill}, but I have only twenty minutes a day. Where do I begin?",
            f"What mistakes do beginners make in {skill}?",
            f"Is it worth learning more about {skill}? Why?",
            f"Make a plan for a month: {worry}, and I want to change that.",
        )
    )


def _rewrite(rng: Random) -> str:
    sentence, style = _pick(rng, SENTENCES, STYLES)
    return rng.choice(
        (
            f'Rewrite this sentence {style}: "{sentence}"',
            f"Correct the mistakes: {sentence}.",
            f'Give me three other ways to say: "{sentence}"',
            f"Turn this into a short dialogue: {sentence}.",
            f"Explain what is wrong with this sentence and improve it: {sentence}.",
        )
    )


def _dialogue(rng: Random) -> str:
    first, second = rng.sample(NAMES, 2)
    return rng.choice(
        (
            f"Write a dialogue between {first} and {second} about {rng.choice(TOPICS)}.",
            f"Write a conversation between {rng.choice(HEROES)} and {rng.choice(JOBS)}.",
            f"Play {rng.choice(JOBS)} and explain your typical day.",
            f"Interview {rng.choice(PEOPLE)}: write five questions and answers.",
            f"{first} wants to go to {rng.choice(COUNTRIES)}, {second} wants to stay at home. Write their discussion.",
        )
    )


def _fact(rng: Random) -> str:
    return rng.choice(
        (
            f"Who was {rng.choice(PEOPLE)}?",
            f"What is {rng.choice(PEOPLE)} known for? Answer in a few sentences.",
            f"Tell me about the history of {rng.choice(COUNTRIES)}.",
            f"What is the food like in {rng.choice(COUNTRIES)}?",
            f"What is the difference between {rng.choice(PAIRS)}?",
            f"How do I make {rng.choice(DISHES)}?",
            f"Give me a recipe for {rng.choice(DISHES)} for {rng.randrange(2, 9)} people.",
            f"What does {rng.choice(JOBS)} do all day?",
            f"Compare {rng.choice(PAIRS)}. Which would you choose?",
            f"What is the capital of {rng.choice(COUNTRIES)} and what is special about it?",
        )
    )


_WISHES = (
    *("" for _ in range(6)),
    " Keep it short.",
    " Answer in detail.",
    " Use bullet points.",
    " Give an example.",
    " Answer in two paragraphs.",
    " Use simple words.",
    " Be specific.",
    " Start with a one-sentence summary.",
)


def _with_wish(make: Callable[[Random], str]) -> Callable[[Random], str]:
    """Let a prompt sometimes say how it wants to be answered."""
    return lambda rng: make(rng) + rng.choice(_WISHES)


KINDS: dict[str, Callable[[Random], str]] = {
    "function": _function,
    "code": _code,
    "arithmetic": _arithmetic,
    "word_problem": word_problem,
    "explain": _with_wish(_explain),
    "list": _with_wish(_listing),
    "story": _with_wish(_story),
    "letter": _with_wish(_letter),
    "advice": _with_wish(_advice),
    "rewrite": _with_wish(_rewrite),
    "dialogue": _with_wish(_dialogue),
    "fact": _with_wish(_fact),
}


def generate_prompts(num: int, *, seed: int) -> list[Prompt]:
    """Return `num` different prompts, the kinds taken in turn; a kind that has run out is passed over."""
    return take_in_turn(KINDS, num, seed=seed)


def take_in_turn(kinds: Mapping[str, Callable[[Random], str]], num: int, *, seed: int) -> list[Prompt]:
    """Return up to `num` different prompts; each kind draws from a seeded generator of its own.

    A kind listed again under a number (`program2`) is asked more often.
    """
    rngs = {kind: Random(f"{seed}/{kind}") for kind in kinds}
    seen: set[str] = set()
    prompts: list[Prompt] = []
    misses = 0
    while len(prompts) < num and misses < 50 * len(kinds):
        for kind, make in kinds.items():
            text = make(rngs[kind])
            key = fingerprint(text)
            if key in seen:
                misses += 1
                continue
            misses = 0
            seen.add(key)
            prompts.append(Prompt(text=text, source=kind.rstrip("0123456789")))
    return prompts[:num]
