# ruff: noqa: E501  (a list is read as a whole)
"""Short, plain questions as people type them: code in many languages, school maths, and daily life.

They stand beside `prompts.py`, whose templates vary words within few tasks; here the tasks themselves are
many. `everyday_prompts(n, seed=s)` is a pure function; a longer list starts with the shorter one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dspark_build.prompt_files import Prompt
from dspark_build.prompts import items, take_in_turn, word_problem

__all__ = ["EVERYDAY_KINDS", "everyday_prompts"]

GENERAL_TASKS = items(
    """
    checks whether a word is an isogram; counts the even numbers in an array; finds the smallest value in an array;
    swaps two variables; computes the power of a number without the built-in operator; prints the first n square numbers;
    checks whether a year is a leap year; computes the sum of all odd numbers up to n; finds the longest common prefix of
    some strings; removes all spaces from a string; turns the first letter of each word into upper case; checks whether an
    array is sorted; shuffles an array; finds the index of the largest element; computes the dot product of two vectors;
    returns the n-th prime number; converts miles to kilometres; counts the capital letters in a string; joins the
    elements of an array with commas; finds the difference between two arrays; checks whether a string contains only
    digits; computes the average of an array; prints a pyramid of stars; rounds a number to two decimals; computes the
    area of a circle; converts a binary string to a number; finds the first character that does not repeat; moves all
    zeros of an array to its end; computes the hypotenuse of a right triangle; returns the last n elements of an array;
    implements bubble sort; implements insertion sort; implements selection sort; implements merge sort; implements quick
    sort; implements binary search; implements linear search; inserts a value into a sorted array; deletes a node from a
    linked list; finds the middle of a linked list; detects a cycle in a linked list; computes the height of a binary
    tree; prints a binary tree in order; performs a breadth-first search on a graph; performs a depth-first search on a
    graph; finds the shortest path with Dijkstra's algorithm; checks whether parentheses are balanced; evaluates an
    expression in postfix notation; converts infix notation to postfix; generates all permutations of a string; generates
    all subsets of a set; solves the Tower of Hanoi; computes binomial coefficients; prints Pascal's triangle; multiplies
    two matrices; rotates a matrix by ninety degrees; finds the determinant of a 2x2 matrix; checks whether a matrix is
    symmetric; computes the Levenshtein distance of two words; finds the longest increasing subsequence; solves the coin
    change problem; solves the knapsack problem; counts the ways to climb n stairs; finds the maximum sum of a contiguous
    subarray; finds the majority element; finds two numbers with a given sum; merges overlapping intervals; computes the
    least common multiple; reduces a fraction; checks whether a number is perfect; checks whether a number is an Armstrong
    number; reverses the digits of a number; counts the set bits of an integer; checks whether a number is a power of two;
    converts a number to Roman numerals; converts a number to words; formats a number with thousands separators; formats a
    date as day, month and year; computes the number of days between two dates; computes someone's age from the birth
    date; returns the weekday of a date; prints the current time; measures the length of a file; reads a text file line by
    line; writes a list of strings to a file; copies a file; lists all files of a folder; finds the largest file in a
    folder; counts the words of a file; replaces a word in a file; parses a line with key=value pairs; reads numbers from
    the keyboard until the user enters zero; asks the user for a name and prints a greeting; plays rock, paper, scissors;
    lets the user guess a number; simulates a coin toss; rolls two dice; draws a random card; picks a random element of a
    list; generates a random string; prints a calendar month; builds a simple calculator with four operations; converts
    temperatures in both directions; computes the monthly rate of a loan; computes a tip; adds sales tax to a price;
    applies a discount to a list of prices; computes a grade from points; finds the student with the best marks; counts
    votes and prints the winner; computes the body mass index; splits a bill among friends; keeps a high score; encrypts a
    text by shifting letters; computes a checksum; validates a credit card number with the Luhn algorithm; validates an
    IP address; validates a phone number; checks whether a URL is well formed; extracts all links of an HTML text;
    extracts all e-mail addresses of a text; removes HTML tags from a text; truncates a long text with an ellipsis; wraps
    a text at eighty characters; counts how often a word occurs in a text; finds the three most common words; censors bad
    words; turns a sentence into a slug for a URL; converts snake case to camel case; converts camel case to snake case;
    compresses a string with run-length encoding; compares two version numbers; parses a JSON string and prints a field;
    converts an object to JSON; downloads a web page; sends a GET request and prints the status; retries a function three
    times; waits for five seconds and prints a message; caches the results of a slow function; logs a message with a time
    stamp; catches an error and prints a clear message; throws an error when a value is negative; sorts a list of people
    by age; groups a list of objects by a field; sums a field over a list of objects; filters a list of objects by price;
    finds an object by its id; updates the stock of a product; removes an item from a cart; counts items per category;
    turns a list into a dictionary; inverts a dictionary; merges two maps by adding their values; finds keys with the same
    value; deep-copies a nested structure; flattens a nested object; compares two objects; computes the union of two sets
    """
)
LANGUAGES = items(
    """
    Python; Python; Python; Python; Python; JavaScript; JavaScript; C; C++; Java; Java; Go; Rust; TypeScript; Ruby; PHP;
    C#; Kotlin; Swift; Bash
    """
)
PYTHON_TASKS = items(
    """
    a context manager that opens and closes a file; a generator that yields the lines of a large file; a decorator that
    retries a function; a decorator that caches results; a decorator that logs every call; a dataclass for a product; an
    enum of weekdays; a property that refuses negative values; a class method that builds an object from a string; a list
    comprehension that keeps the words longer than four letters; a dictionary comprehension that maps words to lengths; a
    lambda that sorts tuples by their second element; a function with default and keyword arguments; a function that takes
    any number of arguments; a try block with else and finally; a script that takes its arguments from the command line
    with argparse; a script that reads a JSON file and prints a table; a script that writes a CSV file with three columns;
    a script that counts the lines of all .py files; a script that renames files with a number; a script that sends an
    HTTP request with the requests library; a small Flask app with two routes; a FastAPI endpoint that adds two numbers; a
    SQLite table with insert and select; a pandas snippet that groups by a column and computes the mean; a pandas snippet
    that removes rows with missing values; a numpy snippet that normalises a matrix by its rows; a matplotlib plot of a sine
    curve; a bar chart with labels; a thread that prints a message every second; an asyncio program that runs two tasks; a
    queue between a producer and a consumer; a unit test with setUp; a pytest fixture; a parametrised pytest test; a mock
    for a function that reads from the network; a recursive function that walks a folder; an iterator class that counts down;
    an abstract base class for shapes; a class that overloads the plus operator; a simple logger; a text menu with three
    entries; a class for a bank account with deposit and withdraw; a class for a playlist; a class for a queue with two
    stacks; a priority queue with heapq; a trie with insert and search; a tic-tac-toe board that prints itself; a hangman
    game; a quiz with three questions; a countdown timer; a to-do list that saves itself to a file; an address book
    """
)
WEB_TASKS = items(
    """
    an HTML table with three rows and a header; an HTML page with a navigation bar; an HTML list of links; an HTML form with a
    drop-down menu and a check box; an HTML page with an image and a caption; a CSS rule that makes every second table row
    grey; a CSS grid with three columns; a CSS flex container with items spread evenly; a CSS button that changes its colour
    when the mouse is over it; a CSS animation that fades a heading in; a responsive menu with a media query; a CSS card with a
    shadow and round corners; a sticky footer; a two-column layout; a JavaScript snippet that toggles a class on click; a
    JavaScript function that validates a form before it is sent; a JavaScript counter with two buttons; a JavaScript snippet
    that loads data with fetch and shows it in a list; a JavaScript debounce function; a JavaScript promise that resolves after
    two seconds; an async function with error handling; a JavaScript class for a shopping cart; a React component that shows a
    list; a React counter with useState; a Vue component with an input field; an Express server with one route; a Node.js script
    that reads a file; a dark mode switch; an image gallery; a login page; a progress bar; a modal dialog; a to-do list in plain
    JavaScript; a digital clock; a colour picker; a search box that filters a list
    """
)
SQL_TASKS = items(
    """
    counts the orders of each customer; lists customers without orders; finds the three most expensive products; computes the
    average salary of each department; finds all students who take more than two courses; joins authors and books; lists
    books published after 2010; finds the second highest salary; updates the price of all products in a category by ten per
    cent; deletes users who never logged in; creates a table for blog posts with a foreign key to users; adds a column for a
    phone number; finds duplicate names; lists the total sales per month; finds employees hired in the last year; shows the
    latest message of each conversation; counts films per genre; finds the longest film; lists all cities with more than a
    million people; ranks players by score with a window function; computes a running total; finds pairs of users who share an
    address; selects rows between two dates; replaces NULL with zero; lists products whose stock is below ten; inserts three
    rows into a table of animals; creates an index on e-mail; counts how many orders were delivered late; finds the most common
    first name; returns the top five customers by money spent
    """
)
SHELL_TASKS = items(
    """
    finds all files larger than 100 MB; counts the lines of every .txt file; deletes files older than thirty days; backs up a
    folder into a dated archive; replaces a word in all files of a folder; prints the ten largest folders; checks whether a
    service is running; pings a list of hosts; renames files to lower case; shows the five processes that use the most memory;
    reads a file line by line; asks for confirmation before it deletes anything; prints the disk usage and warns above ninety
    per cent; loops over the numbers from one to ten; takes two arguments and adds them; downloads a file with curl and checks
    that it is not empty; converts all .png files to .jpg; sorts a CSV file by its second column; extracts all IP addresses of
    a log; creates a folder for each name in a list
    """
)
PATTERNS = items(
    """
    phone numbers such as 555-123-4567; e-mail addresses; hexadecimal colours; times in the form HH:MM; postal codes of five
    digits; words that start with a capital letter; URLs; IP addresses; numbers with an optional decimal part; HTML tags; words
    that end in -ing; strings in double quotes; file names that end in .txt; passwords with a digit and a capital letter;
    repeated words; years from 1900 to 2099; user names of letters, digits and underscores; licence plates such as AB-123-CD
    """
)
CONCEPTS = items(
    """
    a class and an object; a stack and a queue; an array and a linked list; == and is in Python; let, const and var; a process
    and a thread; TCP and UDP; HTTP and HTTPS; a compiler and an interpreter; pass by value and pass by reference; a primary key and
    a foreign key; SQL and NoSQL; GET and POST; an abstract class and an interface; a set and a dictionary; a shallow and a deep copy;
    a while loop and a for loop; a function and a method; git merge and git rebase; unit tests and integration tests; static and
    dynamic typing; break and continue; inner join and left join; synchronous and asynchronous code; RAM and disk storage; a mutable
    and an immutable type; append and extend; print and return; a pointer and a reference; breadth-first and depth-first search; a
    library and a framework; JSON and XML; recursion and iteration; a list and a generator; local and global variables; frontend and
    backend; a virtual machine and a container; authentication and authorisation; encryption and hashing; an int and a float
    """
)
EVERYDAY_THINGS = items(
    """
    breakfast; a morning routine; a balanced diet; drinking enough water; a small flat; a garden; a balcony; indoor plants; roses; herbs;
    compost; a cat; a dog; a hamster; goldfish; a budgie; a horse; a bicycle; a used car; public transport; a road trip; camping; hiking
    boots; a tent; a backpack; skiing; surfing; swimming lessons; tennis; football; basketball; yoga at home; stretching; push-ups; a
    marathon; a gym; weight lifting; dancing; ballet; singing; a choir; the violin; drums; a ukulele; painting with watercolours;
    sketching; pottery; origami; calligraphy; knitting a scarf; sewing a button; embroidery; woodworking; a bookshelf; furniture; a
    leaking tap; a blocked drain; a light bulb; painting a wall; wallpaper; cleaning windows; stains on clothes; laundry; ironing; a
    tidy wardrobe; a minimalist home; moving house; a mortgage; renting; a household budget; saving for retirement; credit cards; debts;
    taxes; insurance; a pension; shares; a first job; a CV; a cover letter; a promotion; a difficult boss; a team meeting; a
    presentation; small talk; networking; remote work; a home office; procrastination; burnout; a side job; a small business; a
    business plan; marketing; a website; a blog; a podcast; social media; passwords; spam; a slow computer; a broken phone; backups;
    a printer; a smart watch; headphones; a camera; a tripod; portrait photos; a wedding; an anniversary; a baby shower; a funeral; a
    graduation; a housewarming; a picnic; a barbecue; a potluck; Christmas; New Year's Eve; Halloween; Easter; Thanksgiving; Diwali;
    Ramadan; Valentine's Day; Mother's Day; a birthday cake; cupcakes; cookies; bread; pasta; sushi; curry; tacos; soup; salad; cheese;
    chocolate; tea; coffee; smoothies; lemonade; wine; vegan cooking; gluten-free baking; leftovers; meal planning; a picky eater;
    toddlers; teenagers; homework; bedtime; screen time; sibling rivalry; a new baby; grandparents; a long-distance relationship; a
    first date; a break-up; an apology; forgiveness; jealousy; trust; shyness; loneliness; stress; anxiety; anger; grief; gratitude;
    self-confidence; motivation; habits; a diary; mindfulness; sleep; naps; dreams; a cold; a headache; back pain; allergies; a sunburn;
    a dentist; glasses; hair loss; dry skin; a haircut; a beard; make-up; perfume; shoes; a suit; jewellery; second-hand clothes;
    recycling; plastic waste; saving energy; solar panels; electric cars; climate change; rain forests; oceans; bees; birds; butterflies;
    sharks; elephants; penguins; wolves; spiders; snakes; dinosaurs; fossils; volcanoes; earthquakes; tornadoes; thunderstorms; snow;
    rainbows; the Moon; Mars; Saturn; stars; black holes; comets; the Sun; eclipses; satellites; rockets; aeroplanes; helicopters; trains;
    ships; submarines; bridges; tunnels; skyscrapers; castles; pyramids; temples; museums; libraries; theatres; cinemas; opera; jazz; rock
    music; hip hop; classical music; folk songs; poetry; novels; detective stories; science fiction; fairy tales; myths; comics; board
    games; chess; card games; puzzles; crosswords; video games; magic tricks; riddles; jokes; proverbs; languages; Latin; sign language;
    accents; spelling; essays; speeches; debates; exams; universities; scholarships; studying abroad; history; archaeology; geography; maps;
    rivers; deserts; islands; mountains; glaciers; caves; lakes; beaches; national parks; cities; villages; farms; markets; festivals;
    elections; democracy; human rights; laws; courts; police; fire safety; first aid; vaccines; antibiotics; vitamins; the heart; the brain;
    muscles; bones; the lungs; digestion; the immune system; genes; evolution; cells; atoms; electricity; magnets; gravity; light; sound;
    heat; water; salt; metals; gold; diamonds; oil; nuclear power; wind turbines; batteries; robots; artificial intelligence; the internet;
    computers; programming; mathematics; statistics; logic; philosophy; psychology; religion; art; architecture; fashion; design; money;
    banks; trade; inflation; unemployment; poverty; charity; volunteering; leadership; teamwork; friendship; love; happiness; time; luck
    """
)
CITIES = items(
    """
    Paris; London; Berlin; Vienna; Prague; Madrid; Lisbon; Athens; Istanbul; Cairo; Marrakesh; Nairobi; Cape Town; Mumbai; Delhi; Bangkok;
    Singapore; Hanoi; Tokyo; Kyoto; Seoul; Beijing; Hong Kong; Sydney; Auckland; Honolulu; San Francisco; New York; Chicago; New Orleans;
    Mexico City; Havana; Lima; Buenos Aires; Rio de Janeiro; Toronto; Montreal; Reykjavik; Oslo; Copenhagen; Dublin; Edinburgh; Amsterdam;
    Brussels; Barcelona; Venice; Florence; Budapest; Warsaw; Helsinki
    """
)
FAMOUS = items(
    """
    Napoleon; Julius Caesar; Alexander the Great; Queen Victoria; George Washington; Abraham Lincoln; Winston Churchill; Martin Luther King;
    Beethoven; Bach; Michelangelo; Rembrandt; Pablo Picasso; Claude Monet; Homer; Plato; Socrates; Confucius; Buddha; Dante; Cervantes; Goethe;
    Charles Dickens; Mark Twain; Leo Tolstoy; Agatha Christie; Ernest Hemingway; Archimedes; Euclid; Copernicus; Johannes Kepler; Gregor Mendel;
    Thomas Edison; Alexander Graham Bell; the Wright brothers; Henry Ford; Stephen Hawking; Grace Hopper; Rosalind Franklin; Jane Goodall;
    Christopher Columbus; Ferdinand Magellan; James Cook; Anne Frank; Mother Teresa; Muhammad Ali; Pele; Charlie Chaplin; Walt Disney; Elvis Presley
    """
)
BOOKS = items(
    """
    Hamlet; Macbeth; Don Quixote; Moby-Dick; Frankenstein; Dracula; Pride and Prejudice; Jane Eyre; Great Expectations; A Christmas Carol; Oliver Twist;
    Alice in Wonderland; The Little Prince; Robinson Crusoe; Treasure Island; Gulliver's Travels; War and Peace; Crime and Punishment; The Odyssey;
    The Iliad; Faust; Les Miserables; The Three Musketeers; Around the World in Eighty Days; The Time Machine; Sherlock Holmes; Peter Pan; Pinocchio;
    Cinderella; Snow White; Hansel and Gretel; Little Red Riding Hood; The Ugly Duckling; Animal Farm; The Great Gatsby
    """
)
CHARACTERS = items(
    """
    a fox; an owl; a postman; a gardener; a ghost; a princess; a pirate; a shepherd; a clock; a tree; a teacher; a violin maker; a cook; a snowman; a
    mermaid; an inventor; a bus driver; twins; a grandmother; an astronaut; a turtle; a cat who can talk; a boy with a kite; a girl who draws maps; a
    bear; a librarian; a fisherman; a thief; a king without a crown; a robot; a bee; a mountain guide; a street musician; a knight; a tailor
    """
)
FINDINGS = items(
    """
    finds an old key; cannot sleep; loses a shadow; hears a voice in the wall; receives a letter without a sender; plants a strange seed; is afraid of the
    dark; moves to the city; makes a friend on a train; gets lost in a forest; builds a boat; wants to see the sea; learns to fly; forgets a birthday; saves
    a bird; finds a photograph; opens a small shop; waits for the first snow; tells a lie; meets a stranger in the rain; misses the bus; wins a strange prize
    """
)
PROVERBS = items(
    """
    actions speak louder than words; the early bird catches the worm; all that glitters is not gold; better late than never; do not judge a book by its
    cover; every cloud has a silver lining; too many cooks spoil the broth; when in Rome, do as the Romans do; practice makes perfect; the pen is mightier
    than the sword; look before you leap; a picture is worth a thousand words; birds of a feather flock together; curiosity killed the cat; honesty is the
    best policy; out of sight, out of mind; Rome was not built in a day; slow and steady wins the race; two wrongs do not make a right; where there is a
    will, there is a way; you reap what you sow; the grass is always greener on the other side; do not put all your eggs in one basket; haste makes waste
    """
)


def _program(rng: Random) -> str:
    language, task = rng.choice(LANGUAGES), rng.choice(GENERAL_TASKS)
    frames = (
        "Write a {l} function that {t}.",
        "Write a {l} function that {t}.",
        "Write a {l} program that {t}.",
        "Show me a {l} function that {t}.",
        "Write a {l} function that {t}, and explain each step.",
        "Write a {l} method that {t}, with a short example.",
        "How do I write a {l} function that {t}?",
        "Write tests for a {l} function that {t}.",
    )
    return rng.choice(frames).format(l=language, t=task)


def _python(rng: Random) -> str:
    task = rng.choice(PYTHON_TASKS)
    frame = rng.choice(
        (
            "Write {t} in Python.",
            "Show me {t} in Python and explain it.",
            "Give me a Python example of {t}.",
        )
    )
    return frame.format(t=task)


def _web(rng: Random) -> str:
    frame = rng.choice(
        ("Create {t}.", "Write the code for {t}.", "Show me {t} and explain how it works.", "Make {t}.")
    )
    return frame.format(t=rng.choice(WEB_TASKS))


def _query(rng: Random) -> str:
    choice = rng.randrange(3)
    if choice == 0:
        return f"Write a bash script that {rng.choice(SHELL_TASKS)}."
    if choice == 1:
        return f"Write a SQL query that {rng.choice(SQL_TASKS)}." + rng.choice(
            ("", " Explain it.", " Invent tables.")
        )
    return f"Write a regular expression that matches {rng.choice(PATTERNS)}." + rng.choice(
        ("", " Explain its parts.", " Use it in Python.", " Use it in JavaScript.")
    )


def _concept(rng: Random) -> str:
    pair = rng.choice(CONCEPTS)
    return rng.choice(
        (
            f"What is the difference between {pair}?",
            f"Explain the difference between {pair} with a code example.",
            f"When should I use {pair}? Explain with an example.",
        )
    )


def _snippet(rng: Random) -> str:
    a, b, c = rng.randrange(2, 9), rng.randrange(4, 20), rng.randrange(2, 6)
    code = rng.choice(
        (
            f"a = [{a}, {b}, {c}]\nb = a[:]\nb.append({a + b})\nprint(a, b)",
            f"def add(item, items=[]):\n    items.append(item)\n    return items\n\nprint(add({a}))\nprint(add({b}))",
            f"for i in range({a}):\n    if i == {c}:\n        continue\n    print(i)",
            f"x = {b}\ny = {c}\nprint(x // y, x % y, x / y)",
            f"numbers = [{a}, {b}, {c}, {a}]\nprint(sorted(set(numbers), reverse=True))",
            f"text = 'banana'\nprint(text[{c - 2}:{a}], text[::-1], text.count('a'))",
            f"def area(w, h)\n    return w * h\nprint(area({a}, {b}))",
            f"total = 0\nfor n in [{a}, {b}, {c}]:\n    total =+ n\nprint(total)",
            f"let x = '{a}';\nlet y = {b};\nconsole.log(x + y);",
            f"const xs = [{a}, {b}, {c}];\nconsole.log(xs.map(x => x * {c}).filter(x => x > {b}));",
            f'int i = {a};\nwhile (i < {b}) {{\n    i += {c};\n}}\nprintf("%d\\n", i);',
            "names = ['Ann', 'Bob', 'Cid']\nfor i in range(len(names) + 1):\n    print(i, names[i])",
            f"def is_even(n):\n    if n % 2 = 0:\n        return True\n    return False\nprint(is_even({a}))",
            f"result = ''\nfor ch in 'hello world':\n    if ch not in 'aeiou':\n        result += ch\nprint(result * {c})",
            f"squares = {{n: n * n for n in range({c}, {b})}}\nprint(squares[{c}])",
            f"stack = []\nfor n in range({a}):\n    stack.append(n * {c})\nwhile stack:\n    print(stack.pop())",
        )
    )
    question = rng.choice(
        (
            "What does this code print?",
            "What is the output of this code, and why?",
            "Find the bug in this code and fix it:",
            "Explain this code:",
            "Rewrite this code so that it is easier to read:",
            "Add comments to this code:",
        )
    )
    return f"{question}\n\n{code}"


def _school(rng: Random) -> str:
    a, b, c, d = rng.randrange(2, 30), rng.randrange(2, 50), rng.randrange(2, 12), rng.randrange(2, 9)
    price = rng.randrange(2, 40) * 5
    return rng.choice(
        (
            f"Solve the equation {c}x + {b} = {d}x + {b + (c - d) * a}.",
            f"Solve {c}x - {b} = {c * a - b} and check your answer.",
            f"What is {a * 3} * {b}? Show how you work it out.",
            f"What is {a * b} divided by {a}?",
            f"Find the greatest common divisor of {a * c} and {b * c}.",
            f"Find the least common multiple of {a} and {c}.",
            f"Simplify the fraction {a * c}/{b * c}.",
            f"What is {rng.choice((5, 10, 20, 25, 30, 40, 75))}% of {price}?",
            f"A coat costs {price} dollars and is reduced by {rng.choice((10, 20, 30, 50))}%. What is the new price?",
            f"Find the area and the perimeter of a rectangle that is {a} cm long and {c} cm wide.",
            f"What is the area of a circle with radius {c} cm? Use 3.14 for pi.",
            f"What is the volume of a box that is {a} cm long, {c} cm wide and {d} cm high?",
            f"A bus travels {a * d * 5} km in {d} hours. What is its average speed?",
            f"What is the slope of the line through ({c}, {d}) and ({c + d}, {b})?",
            f"Compute the mean of {a}, {b}, {c}, {d} and {a + d}.",
            f"What is the median of {b}, {a}, {d}, {c} and {a + b}?",
            f"Two numbers add up to {a + b + c} and their difference is {c}. Find both numbers.",
            f"The sum of three consecutive numbers is {3 * b + 3}. What are the numbers?",
            f"A bag holds {a} red, {c} blue and {d} green marbles. What is the probability of drawing a red one?",
            f"Expand and simplify (x + {c})(x - {d}).",
            f"Factor x^2 + {c + d}x + {c * d}.",
            f"What is {c}^{rng.randrange(2, 5)}?",
            f"Convert {c}/{a + c} to a decimal.",
            f"Round {a * b * 7 / 13:.4f} to two decimal places.",
            f"How many seconds are there in {a} minutes?",
            f"If {c} pencils cost {c * d} dollars, how much do {b} pencils cost?",
            f"What is the next number in the sequence {c}, {c + d}, {c + 2 * d}, {c + 3 * d}? Explain.",
            f"A triangle has angles of {a + 20} and {b + 20} degrees. How large is the third angle?",
            f"What is the square root of {a * a}?",
            f"Write {a * 7} in binary.",
            f"Add {a}/{c + 1} and {d}/{c + 1}.",
            f"If f(x) = {c}x + {d}, what is f({a})?",
        )
    )


def _question(rng: Random) -> str:
    thing = rng.choice(EVERYDAY_THINGS)
    return rng.choice(
        (
            f"What should I know about {thing}?",
            f"Give me five tips about {thing}.",
            f"What are three good ideas for {thing}?",
            f"Explain {thing} to a ten-year-old.",
            f"Why do people care about {thing}?",
            f"Write a short poem about {thing}.",
            f"Write a paragraph about {thing}.",
            f"What are the pros and cons of {thing}?",
            f"Tell me something interesting about {thing}.",
            f"How do I get started with {thing}?",
            f"I have a problem with {thing}. What should I do?",
            f"Write a short story about {thing}.",
            f"What are common mistakes with {thing}?",
            f"Can you suggest a good way to learn about {thing}?",
            f"Write a friendly e-mail to a friend about {thing}.",
            f"What is the history of {thing}?",
            f"Give me a short summary of what matters about {thing}.",
            f"Write a dialogue of two friends about {thing}.",
            f"Compare {thing} with {rng.choice(EVERYDAY_THINGS)}.",
            f"How has {thing} changed over the years?",
        )
    )


def _world(rng: Random) -> str:
    return rng.choice(
        (
            f"What should I see if I have only one day in {rng.choice(CITIES)}?",
            f"Plan a weekend in {rng.choice(CITIES)}.",
            f"What is {rng.choice(CITIES)} famous for?",
            f"Compare {rng.choice(CITIES)} and {rng.choice(CITIES)}.",
            f"Who was {rng.choice(FAMOUS)} and why is this person famous?",
            f"Tell me about {rng.choice(FAMOUS)} in five sentences.",
            f"Summarise {rng.choice(BOOKS)} in four sentences.",
            f"What is {rng.choice(BOOKS)} about?",
            f'What does the proverb "{rng.choice(PROVERBS)}" mean?',
            f"Tell a short story that shows that {rng.choice(PROVERBS)}.",
        )
    )


def _tale(rng: Random) -> str:
    who, what = rng.choice(CHARACTERS), rng.choice(FINDINGS)
    return rng.choice(
        (
            f"Tell me a short story about {who} who {what}.",
            f"Write a story for children: {who} {what}.",
            f"Write a poem about {who}.",
            f"Write the opening of a novel in which {who} {what}.",
            f"Describe {who} in one paragraph.",
        )
    )


EVERYDAY_KINDS: dict[str, Callable[[Random], str]] = {
    "program": _program,
    "python": _python,
    "program2": _program,
    "question": _question,
    "web": _web,
    "school": _school,
    "world": _world,
    "query": _query,
    "question2": _question,
    "snippet": _snippet,
    "tale": _tale,
    "concept": _concept,
    "word_problem": word_problem,
    "question3": _question,
    "program3": _program,
}


def everyday_prompts(num: int, *, seed: int) -> list[Prompt]:
    """Return `num` different prompts, the kinds taken in turn; a kind that has run out is passed over."""
    return take_in_turn(EVERYDAY_KINDS, num, seed=seed)
