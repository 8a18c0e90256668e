// The length controls of one run, shown for models with a length model: no guidance, a scale, or a target length.

import { counted } from "./dom.js";

const SLIDERS = { scale: { min: -10, max: 10, step: 1, value: -5 }, target: { min: 5, max: 200, step: 5, value: 40 } };

export class Guidance {
  /** `changed` is called when the user changes a control. `name`: begins the names of the kept controls. */
  constructor(element, name, changed) {
    this.element = element;
    this.mode = element.querySelector(".guide-mode");
    this.label = element.querySelector(".guide-slider");
    this.slider = element.querySelector("input");
    this.shown = element.querySelector(".guide-value");
    [this.mode.name, this.slider.name] = [`${name}-length`, `${name}-length-value`];
    this.mode.addEventListener("change", () => {
      Object.assign(this.slider, SLIDERS[this.mode.value] ?? {});
      this.draw();
      changed();
    });
    this.slider.addEventListener("input", () => {
      this.draw();
      changed();
    });
  }

  get active() {
    return !this.element.hidden && this.mode.value !== "off" && this.slider.value !== "0";
  }

  /** Show the controls if the model has a length model. */
  allow(allowed) {
    this.element.hidden = !allowed;
    this.draw();
  }

  draw() {
    this.label.hidden = this.mode.value === "off";
    const value = Number(this.slider.value);
    const word = value === 0 ? "no change" : `${value < 0 ? "shorter" : "longer"} (${value > 0 ? "+" : "−"}${Math.abs(value)})`;
    this.shown.textContent = this.mode.value === "target" ? counted(value, "token") : word;
    this.slider.setAttribute("aria-valuetext", this.shown.textContent);
  }

  /** `length_guidance` of a request, or null. `written`: tokens of the answer that are in the prompt already. */
  field(written) {
    if (!this.active) return null;
    const value = Number(this.slider.value);
    const wish = this.mode.value === "scale" ? { scale: value } : { target_length: Math.max(0, value - written) };
    return { ...wish, return_values: true };
  }
}
