// Search in pages that are opened from disk: browsers refuse workers there, so the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = `<script src="${new URL(url, location)}"></script>`
      this.ready = new Promise((resolve) => {
        frame.addEventListener("load", () => resolve(frame.contentWindow))
      })
      document.documentElement.append(frame)
      this.ready.then((target) => {
        target.postMessage = (data) => {
          const event = new MessageEvent("message", { data })
          this.onmessage?.(event)
          this.dispatchEvent(event)
        }
      })
    }

    postMessage(data) {
      this.ready.then((target) => target.dispatchEvent(new target.MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
