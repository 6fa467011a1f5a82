// Return the texts in view whose contrast to what is behind them is below WCAG's AA: 4.5, or 3 for large text.
() => {
  const parse = (text) => {
    const numbers = text.match(/-?[\d.]+(e-?\d+)?/g).map(Number);
    const [r, g, b, a = 1] = text.startsWith("color(")
      ? numbers.map((n, i) => (i < 3 ? n * 255 : n))
      : numbers;
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], [R, G, B]) => [
    r * a + R * (1 - a),
    g * a + G * (1 - a),
    b * a + B * (1 - a),
    1,
  ];
  const luminance = (rgb) => {
    const [r, g, b] = rgb
      .slice(0, 3)
      .map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  /** Every colour that may be behind an element: its own and its gradient's over what is behind it. */
  const behind = (element) => {
    if (!element) return [[255, 255, 255, 1]];
    const style = getComputedStyle(element);
    const own = parse(style.backgroundColor);
    const base = own[3] === 1 ? [own] : behind(element.parentElement).map((under) => over(own, under));
    const drawn = style.backgroundImage.match(/(rgba?|color)\([^()]*\)/g) ?? [];
    return [
      ...base,
      ...drawn.map((colour) => parse(colour)).flatMap((colour) => base.map((under) => over(colour, under))),
    ];
  };
  const low = [];
  let checked = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || element.closest("noscript, script, option, .visually-hidden")) continue;
    if (!element.checkVisibility({ visibilityProperty: true }) || element.getClientRects().length === 0)
      continue;
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const colour = parse(element instanceof SVGElement ? style.fill : style.color);
    const worst = Math.min(...behind(element).map((under) => ratio(over(colour, under), under)));
    checked += 1;
    if (worst < (large ? 3 : 4.5))
      low.push(`${element.className} ${node.textContent.trim().slice(0, 30)}: ${worst.toFixed(2)}`);
  }
  return { checked, low };
};
